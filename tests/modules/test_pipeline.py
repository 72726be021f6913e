"""Training steps over several ranks: settings, loaders' micro-batches, evaluation, clipping, precision, checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from megatron_dynapipe import CutPoint, Pipeline, split_model
from megatron_dynapipe.core.errors import CheckpointError, ConfigError, DataError
from megatron_dynapipe.modules.trace import ReadAttributes
from tests.helpers.processes import in_ranks, run_ranks

OFFSET = 0.0


class Toy(nn.Module):
    """Layers with cuts before them, and a weight that the first and the last layer share."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(layers)])
        self.settings = SimpleNamespace(factor=1.0, unused=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.settings.factor + OFFSET
        for cut, layer in zip(self.cuts, self.layers, strict=True):
            x = torch.tanh(layer(cut(x)))
        return x @ self.table.weight.T


def toy(seed: int = 5, layers: int = 3) -> Toy:
    torch.manual_seed(seed)
    return Toy(layers)


def toy_loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    loss = nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss, batch["labels"].numel()


def toy_batch(size: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 16, (size, length), generator=draw) for key in ("ids", "labels")}


def toy_pipeline(lr: float = 0.1, replicas: int = 1, **settings: Any) -> tuple[Any, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    split = {key: settings.pop(key) for key in ("stages", "split_points") if key in settings}
    part = split_model(toy(), toy_batch(2, 3, 0), replicas=replicas, **split)
    optimizer = torch.optim.AdamW(part.parameters(), lr=lr)
    return part, Pipeline(part, optimizer, toy_loss, **settings)


def whole_losses(steps: int, lr: float = 0.1, max_norm: float | None = None) -> list[float]:
    """What one process comes to."""
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        batch = toy_batch(4, 5 + step, step)
        optimizer.zero_grad()
        total, count = toy_loss(model(batch["ids"]), batch)
        (total / count).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append((total / count).item())
    return losses


@pytest.mark.parametrize("kind", [set, frozenset])
def test_equal_sets_are_one_state_however_they_are_walked(kind):
    """`peft` keeps names of modules in a set, whose order differs between processes."""

    def state(numbers: list[int]) -> str:
        model = toy()
        model.settings.unused = kind(numbers)
        return ReadAttributes(model, model, [("", "settings")], []).state()

    assert list({0, 8}) != list({8, 0}), "numbers that fall into one place of a small set"
    assert state([0, 8]) == state([8, 0]) != state([0, 16])


@in_ranks(2)
def test_attributes_and_globals_that_tracing_read_may_change(rank):
    global OFFSET
    dist.init_process_group("gloo")
    model, batch = toy(), toy_batch(4, 6, 9)
    pipeline = Pipeline(split_model(model, batch, split_points=["layers.1"]), None, toy_loss)
    for factor, offset in ((1.0, 0.0), (2.0, 0.0), (2.0, 0.5), (1.0, 0.0)):
        model.settings.factor, OFFSET = factor, offset
        whole, count = toy_loss(model(batch["ids"]), batch)
        assert pipeline.step(batch).loss.item() == pytest.approx(float(whole.detach()) / count, abs=1e-5)
    assert len(pipeline.part._variants._known) == 3, "the model is traced once for each set of values"
    model.settings.factor = 3.0 + rank
    with pytest.raises(ConfigError, match="and the model's attributes to be the same on ranks 0, 1"):
        pipeline.step(batch)


@in_ranks(2)
def test_settings_change_no_loss(rank):
    dist.init_process_group("gloo")
    expected, clipped = whole_losses(3), whole_losses(3, max_norm=0.3)
    assert clipped != pytest.approx(expected, abs=1e-3)
    for settings in (
        {},
        {"max_norm": 0.3},
        {"micro_batches": 1},
        {"micro_batch_size": 1},
        {"schedule": "gpipe"},
        {"stages": 4},
    ):
        _, pipeline = toy_pipeline(**settings)
        losses = [pipeline.step(toy_batch(4, 5 + step, step)).loss.item() for step in range(3)]
        assert losses == pytest.approx(clipped if "max_norm" in settings else expected, abs=1e-5), settings
    part, pipeline = toy_pipeline()
    batch = toy_batch(4, 6, 9)
    total, count = toy_loss(toy()(batch["ids"]), batch)
    alone = pytest.approx(total.item() / count, abs=1e-5)
    assert pipeline.evaluate(batch).loss.item() == alone
    assert part.training and all(p.grad is None for p in part.parameters())
    result = pipeline.step((batch["ids"], batch["labels"]), return_outputs=True)
    (loss, overflow), outputs, labels = result, result.outputs, result.labels
    assert result[0] is loss and result == (loss, overflow), "the pair that is documented"
    assert not loss.requires_grad and not overflow
    assert [output.shape for output in outputs] == [(2, 6, 16)] * 2 * rank
    assert torch.equal(torch.cat([row["labels"] for row in labels] or [batch["labels"]]), batch["labels"])
    assert len(labels) == len(outputs)
    assert all(not output.requires_grad for output in outputs)
    rows = [{key: value[k : k + 2] for key, value in toy_batch(4, 6, 9).items()} for k in (0, 2)]
    _, fresh = toy_pipeline()
    assert fresh.run(rows).loss.item() == alone
    assert fresh.run([]).loss.item() == 0


@in_ranks(4)
def test_replicas_of_different_sizes_and_tied_weights():
    """Also: the embedding that the first stage reads and the last one multiplies with stays one weight."""
    part, pipeline = toy_pipeline(replicas=2, split_points=["layers.1"])
    losses = []
    for step in range(3):
        batch = toy_batch(4, 5 + step, step)
        rows = slice(0, 3) if part.replica == 0 else slice(3, 4)
        if step == 2:  # one replica has nothing to do
            rows = slice(0, 4) if part.replica == 0 else slice(0, 0)
        share = {key: value[rows] for key, value in batch.items()}
        losses.append((pipeline.run([share]) if len(share["ids"]) else pipeline.run([])).loss.item())
    assert losses == pytest.approx(whole_losses(3), abs=1e-5)
    dist.broadcast(first := part.table.weight.detach().clone(), 0)
    assert torch.equal(first, part.table.weight)


@in_ranks(2)
def test_half_precision_and_a_loss_scale_that_all_ranks_agree_on():
    part, pipeline = toy_pipeline(precision="bf16")
    losses = [pipeline.step(toy_batch(4, 5 + step, step)).loss.item() for step in range(3)]
    assert losses == pytest.approx(whole_losses(3), abs=0.05)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    part = split_model(toy(), toy_batch(2, 3, 0))
    pipeline = Pipeline(
        part, torch.optim.AdamW(part.parameters(), lr=0.1), toy_loss, precision="fp16", loss_scale=scale
    )
    before = [p.detach().clone() for p in part.parameters()]
    scales = []
    while (result := pipeline.step(toy_batch(4, 5, 0))).overflow:
        scales.append(pipeline.loss_scale.get_scale())
        assert all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
    assert result.loss.item() == pytest.approx(whole_losses(1)[0], abs=0.02)
    assert scales[0] == 2.0**39
    assert part.ranks.control.broadcast_text(str(scales)) == str(scales)


@in_ranks(4)
def test_an_overflow_on_one_replica_skips_the_step_on_all(tmp_path):
    """Also: the loss scale is saved with the weights."""
    part, _ = toy_pipeline(replicas=2, split_points=["layers.1"])
    settings = {"precision": "fp16", "loss_scale": torch.amp.GradScaler("cpu", init_scale=8.0)}

    def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        loss, count = toy_loss(output, batch)
        return loss * (float("inf") if part.replica and not overflows else 1.0), count

    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    pipeline = Pipeline(part, optimizer, loss_fn, **settings)
    overflows: list[bool] = []
    for _ in range(2):
        before = [p.detach().clone() for p in part.parameters()]
        overflows.append(pipeline.step(toy_batch(2, 5, part.replica)).overflow)
        kept = all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))
        assert kept == overflows[-1]
    assert overflows == [True, False]
    pipeline.save(tmp_path / "checkpoint")
    pipeline.loss_scale.update(1.0)
    pipeline.load(tmp_path / "checkpoint")
    state = pipeline.loss_scale.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (4.0, 1)


def first_half(rank: int, world_size: int, folder: str, stages: int) -> list[float]:
    _, pipeline = toy_pipeline(replicas=world_size // stages, split_points=SPLITS[stages])
    losses = [step_of(pipeline, step) for step in range(2)]

    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint {__file__}/below: "):
        pipeline.save(f"{__file__}/below")
    pipeline.save(folder)
    return losses


def second_half(rank: int, world_size: int, folder: str, stages: int) -> list[float]:
    part, pipeline = toy_pipeline(replicas=world_size // stages, split_points=SPLITS[stages])
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.fill_(9.0)
    pipeline.load(folder)
    return [step_of(pipeline, step) for step in range(2, 4)]


SPLITS = {1: [], 2: ["layers.1"], 4: ["layers.0", "layers.1", "layers.2"]}


def step_of(pipeline: Any, step: int) -> float:
    batch, replicas = toy_batch(4, 5 + step, step), pipeline.part.ranks.replicas
    return pipeline.step({k: v.tensor_split(replicas)[pipeline.replica] for k, v in batch.items()}).loss.item()


def test_a_checkpoint_goes_on_under_other_stages_and_replicas(tmp_path):
    folder = str(tmp_path / "checkpoint")
    expected = whole_losses(4)
    for losses in run_ranks(first_half, 2, {"folder": folder, "stages": 2}):
        assert losses == pytest.approx(expected[:2], abs=1e-5)
    for ranks, stages in ((4, 4), (2, 1)):
        for losses in run_ranks(second_half, ranks, {"folder": folder, "stages": stages}):
            assert losses == pytest.approx(expected[2:], abs=1e-5)
    names = set(checkpoint_names(tmp_path / "checkpoint"))
    assert {name for name in names if not name.startswith(("optimizer", "dynapipe"))} == set(toy().state_dict())


def checkpoint_names(folder: Path) -> list[str]:
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def refused(rank: int, world_size: int, folder: Path) -> None:
    """Of no folder, of a changed one, and of the toy's checkpoint in a model of one layer more, and of one less."""
    _, pipeline = toy_pipeline(split_points=["layers.1"])
    pipeline.save(folder / "saved")
    unread = "cannot read the checkpoint"
    changed = "expected the files that were saved, found others under __1_0.distcp"
    for name, said in (("none", unread), ("checkpoint", changed)):
        with pytest.raises(DataError, match=said):
            pipeline.load(folder / name)
    for layers, said in ((4, unread), (2, "which also holds layers.")):
        part = split_model(toy(layers=layers), toy_batch(2, 3, 0), split_points=["layers.1"])
        with pytest.raises(DataError, match=said):
            Pipeline(part, torch.optim.AdamW(part.parameters()), toy_loss).load(folder / "saved")


def test_a_checkpoint_that_is_not_there_was_changed_or_is_of_another_model_is_refused_on_every_rank(tmp_path):
    folder = tmp_path / "checkpoint"
    run_ranks(first_half, 2, {"folder": str(folder), "stages": 2})
    file = folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run_ranks(refused, 2, {"folder": tmp_path})
