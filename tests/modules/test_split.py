"""What a rank holds of a model: its part, its values, and no more."""

from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe import Pipeline, split_model
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.runtime.memory import LiveStorages
from tests.helpers.processes import in_ranks, run_ranks
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


class Lazy(Remembering):
    """A state dict whose values are made when they are asked for, as a file's are."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full(self._values[name].shape, 0.5)


class RealMemory(LiveStorages):
    """Counts nothing of tensors without memory."""

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._note(storage)


@in_ranks(2)
def test_a_rank_never_holds_more_than_its_part_and_one_layer():
    """Values come from a state dict, one at a time, or from the layers themselves."""
    dist.init_process_group("gloo")
    for name in ("state dict", "meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to("meta")
        with RealMemory() as live:
            values = Lazy(model.state_dict()) if name == "state dict" else None
            part = split_model(model, torch.zeros(2, 256), split_points=["4"], state_dict=values)
            del model
        assert len(list(part.parameters())) == 8
        ratio = live.peak_bytes / sum(p.nbytes for p in part.parameters())
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


@in_ranks(2)
def test_a_model_without_memory_is_filled_in_this_ranks_part_alone(rank):
    dist.init_process_group("gloo")
    batch, empty = toy_batch(2, 3, 0), Toy().to("meta")
    values = Remembering(toy().state_dict())
    part = split_model(empty, batch, split_points=["layers.1"], state_dict=values)
    layers = ["layers.0"] if rank == 0 else ["layers.1", "layers.2"]
    held = [*(f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight")), "table.weight"]
    assert sorted(set(values.read)) == sorted(part.state_dict()) == held
    assert not any(p.is_meta for p in part.parameters())
    assert any(p.is_meta for p in empty.parameters()), "the rest of the model stays without memory"
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=0.1), toy_loss)
    losses = [pipeline.step(toy_batch(4, 5 + step, step)).loss.item() for step in range(2)]
    assert losses == pytest.approx(whole_losses(2), abs=1e-5)
    fresh = split_model(Toy().to("meta"), batch, split_points=["layers.1"])
    assert all(bool(p.isfinite().all()) for p in fresh.parameters())
    assert ("= received" in fresh.source()) == (rank == 1)
    del values._values["layers.2.bias"]
    with pytest.raises(ConfigError, match=r"expected a value of layers\.2\.bias in the state dict"):
        split_model(Toy().to("meta"), batch, split_points=["layers.1"], state_dict=values)
