"""Stages of the user's own: shapes are exchanged once for each new one, and shared modules stay equal."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe import Pipeline, SharedModule, Stage
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.runtime.control_group import ControlGroup
from tests.helpers.processes import in_ranks
from tests.modules.test_pipeline import checkpoint_names


class First(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.table(ids)
        return {"x": self.layer(x), "ids": ids * 2, "more": [x.mean(1), 0.5, "word"]}


class Last(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = table

    def forward(self, given: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
        mean, half, word = given["more"]
        assert word == "word" and given["ids"].dtype == torch.int64
        return (self.layer(given["x"]) * scale[:, None, None] + mean[:, None] * half) @ self.table.weight.T


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        table = nn.Embedding(16, 8)
        self.first, self.last = First(table), Last(table)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(ids), scale)


def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    loss = nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss, batch["labels"].numel()


def batch_of(size: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(size * 100 + length)
    ids = {key: torch.randint(0, 16, (size, length), generator=draw) for key in ("ids", "labels")}
    return {**ids, "scale": torch.rand(size, generator=draw)}


SIZES = [(4, 6), (4, 6), (3, 6), (4, 6), (4, 9), (4, 9)]
"""Of a step's batch: the two micro-batches of each are of two shapes where it is odd."""


def count_messages() -> dict[str, int]:
    """Count how often ranks tell each other texts from now on."""
    counts: dict[str, int] = {}
    original = ControlGroup.gather_texts

    def counted(control: Any, text: str) -> list[str]:
        counts["texts"] = counts.get("texts", 0) + 1
        return original(control, text)

    ControlGroup.gather_texts = counted
    return counts


@in_ranks(2)
def test_shapes_are_exchanged_once_for_each_new_one(rank):
    dist.init_process_group("gloo")
    whole, model = Whole(), Whole()
    module = (model.first, model.last)[rank]
    SharedModule([0, 1]).register(module.table)
    if rank == 1:
        nn.init.zeros_(module.table.weight)  # starts as the first stage's
    part = Stage(module, batch_of(2, 3))
    pipeline = Pipeline(part, torch.optim.SGD(part.parameters(), lr=0.1), loss_fn, max_norm=0.5)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    learned, messages = [], count_messages()
    for size, length in SIZES:
        batch = batch_of(size, length)
        before = part.tracker.learned
        loss = pipeline.step(batch).loss.item()
        learned.append((part.tracker.learned - before, messages.pop("texts", 0)))
        optimizer.zero_grad()
        total, count = loss_fn(whole(batch["ids"], batch["scale"]), batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        assert loss == pytest.approx((total / count).item(), abs=1e-5)
    # (4, 6): two micro-batches of 2; (3, 6): one of 2, known, and one of 1; (4, 9): new. Two stages say what they send.
    assert learned == [(1, 2), (0, 0), (1, 2), (0, 0), (1, 2), (0, 0)]
    dist.broadcast(first := module.table.weight.detach().clone(), 0)
    assert torch.equal(first, module.table.weight)
    assert rank == 1 or [name for name, _ in part.named_parameters()] == ["table.weight", "layer.weight", "layer.bias"]


class Plain(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


class Broken(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, :3])


def squares(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


@in_ranks(4)
def test_stages_of_ones_own_are_saved_each_and_shared_weights_once(rank, tmp_path):
    """Two replicas of stages whose weights have the same names; a shared module of two names is one after 20 steps."""
    dist.init_process_group("gloo")
    stage = rank // 2
    module = nn.Sequential(Plain(stage), Plain(stage + 2))
    shared = SharedModule([0, 1]).register(module[stage].layer)
    x = {"input": torch.linspace(-1, 1, 24).view(6, 4)}
    part = Stage(module, x, replicas=2)
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=0.1), squares, max_norm=0.1)
    for _ in range(20):
        pipeline.step(x)
    pipeline.save(tmp_path / "checkpoint")
    values = {name: value.clone() for name, value in part.state_dict().items()}
    next_loss = pipeline.step(x).loss.item()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.fill_(rank)
    pipeline.load(tmp_path / "checkpoint")
    assert all(torch.equal(value, values[name]) for name, value in part.state_dict().items())
    assert pipeline.step(x).loss.item() == next_loss
    dist.broadcast(first := shared.weight.detach().clone(), 0)
    assert torch.equal(first, shared.weight)
    names = {name for name in checkpoint_names(tmp_path / "checkpoint") if not name.startswith("optimizer")}
    places = ["stages.0.0", "stages.0.1", "stages.1.0"]  # stages.1.1 is the first stage's 0
    assert names == {f"{place}.layer.{kind}" for place in places for kind in ("weight", "bias")}


@in_ranks(3)
def test_shapes_that_are_given_need_no_message(rank):
    dist.init_process_group("gloo")
    messages = count_messages()

    def shapes(batch: Any) -> list[tuple[int, ...]]:
        return [tuple(batch["x"].shape)]

    x = torch.linspace(-1, 1, 24).view(6, 4)
    expected = Plain(2)(Plain(1)(Plain(0)(x))).square().sum().item() / 6
    for given in (None, [(2, 4)], shapes):
        part = Stage(Plain(rank), {"x": x})
        pipeline = Pipeline(part, None, squares, micro_batches=3, tensor_shapes=given)
        messages.clear()
        assert pipeline.step({"x": x}).loss.item() == pytest.approx(expected, rel=1e-5)
        assert messages.get("texts", 0) == (3 if given is None else 0), "what each stage sends"
    broken = Stage(Broken(rank) if rank == 1 else Plain(rank), {"x": x})
    with pytest.raises(ConfigError, match="stage 1 cannot run a batch of these shapes"):
        Pipeline(broken, None, squares, timeout_s=30).step({"x": x})
