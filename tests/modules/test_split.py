"""What a rank holds of a model: its part, its values, and no more."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe import Pipeline, split_model
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.memory import LiveStorages
from tests.helpers.processes import run_ranks
from tests.modules.test_pipeline import Toy, toy, toy_batch, toy_loss, whole_losses


class Remembering(Mapping[str, torch.Tensor]):
    """A state dict that writes down what is read of it."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values, self.read = values, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values


def parts(rank: int, world_size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    batch, found = toy_batch(2, 3, 0), {}
    empty = Toy().to("meta")
    values = Remembering(toy().state_dict())
    part = split_model(empty, batch, split_points=["layers.1"], state_dict=values)
    found["read"] = sorted(set(values.read))
    found["held"] = sorted(part.state_dict())
    found["on meta"] = sum(p.is_meta for p in part.parameters()) + sum(p.is_meta for p in empty.parameters()) * 100
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=0.1), toy_loss)
    found["losses"] = [pipeline.step(toy_batch(4, 5 + step, step)).loss.item() for step in range(2)]
    fresh = split_model(Toy().to("meta"), batch, split_points=["layers.1"])
    found["finite"] = all(bool(p.isfinite().all()) for p in fresh.parameters())
    found["source"] = fresh.source()
    del values._values["layers.2.bias"]
    try:
        split_model(Toy().to("meta"), batch, split_points=["layers.1"], state_dict=values)
    except ConfigError as error:
        found["missing"] = str(error)
    return found


class Lazy(Remembering):
    """A state dict whose values are made when they are asked for, as a file's are."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full(self._values[name].shape, 0.5)


class RealMemory(LiveStorages):
    """Counts nothing of tensors without memory."""

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._note(storage)


def most_memory(rank: int, world_size: int) -> dict[str, float]:
    """Bytes of tensors that were made at most while a part was split off and filled, over those of the part."""
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    for name in ("state dict", "meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to("meta")
        with RealMemory() as live:
            values = Lazy(model.state_dict()) if name == "state dict" else None
            part = split_model(model, torch.zeros(2, 256), split_points=["4"], state_dict=values)
            del model
        assert len(list(part.parameters())) == 8
        found[name] = live.peak_bytes / sum(p.nbytes for p in part.parameters())
    return found


def test_a_rank_never_holds_more_than_its_part_and_one_layer():
    """Values come from a state dict, one at a time, or from the layers themselves."""
    for found in run_ranks(most_memory, 2):
        for name, ratio in found.items():
            assert 0.99 < ratio < 1.26, name  # a part is four layers


def both_ways(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], bool]:
    dist.init_process_group("gloo")
    part = split_model(toy(), toy_batch(2, 3, 0), stages=4)
    mine = {name: value.clone() for name, value in part.state_dict().items()}
    other = toy(seed=9).state_dict()
    part.load_state_dict({name: other[name] for name in mine}, strict=True)
    return mine, all(torch.equal(value, other[name]) for name, value in part.state_dict().items())


def test_state_dicts_go_from_the_whole_model_to_its_parts_and_back():
    ranks = run_ranks(both_ways, 2)
    whole = toy(seed=9)
    whole.load_state_dict({name: value for mine, _ in ranks for name, value in mine.items()}, strict=True)
    assert all(torch.equal(value, toy().state_dict()[name]) for name, value in whole.state_dict().items())
    assert all(loaded for _, loaded in ranks)


def test_a_model_without_memory_is_filled_in_this_ranks_part_alone():
    first, last = run_ranks(parts, 2)
    assert first["read"] == first["held"] == ["layers.0.bias", "layers.0.weight", "table.weight"]
    assert last["read"] == last["held"]
    assert last["held"] == ["layers.1.bias", "layers.1.weight", "layers.2.bias", "layers.2.weight", "table.weight"]
    for found in (first, last):
        assert found["losses"] == pytest.approx(whole_losses(2), abs=1e-5)
        assert found["on meta"] % 100 == 0 < found["on meta"], "the rest of the model stays without memory"
        assert found["finite"]
        assert "expected a value of layers.2.bias in the state dict" in found["missing"]
    assert "= received" in last["source"] and "= received" not in first["source"]
