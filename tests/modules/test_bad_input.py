"""What cannot work is one clear error on every rank, and none of them hangs."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe import Pipeline, SharedModule, Stage, split_model
from megatron_dynapipe.core.errors import ConfigError, DataError, DynaPipeError
from megatron_dynapipe.modules.inputs import Inputs
from megatron_dynapipe.modules.trace import CutPoint
from tests.helpers.processes import run_ranks
from tests.modules.test_pipeline import Toy, toy, toy_batch, toy_loss


class Twice(Toy):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.cuts[0](self.table(ids)).mean()


class Never(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = CutPoint()


class Spare(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Embedding(16, 8)


class Branching(Toy):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return x if x.mean() > 0 else -x


def said_by(function: Any) -> str:
    try:
        function()
    except DynaPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What every rank says to one wrong call after another; each is alone at fault where it can be."""
    dist.init_process_group("gloo")
    batch, said = toy_batch(4, 5, 0), {}

    def split(model: nn.Module, example: Any = batch, **settings: Any) -> Any:
        return split_model(model, example, timeout_s=30, **settings)

    said["twice"] = said_by(lambda: split(Twice()))
    said["never"] = said_by(lambda: split(Never()))
    said["branch"] = said_by(lambda: split(Branching() if rank else toy()))
    said["too few"] = said_by(lambda: split(toy(), stages=6))
    said["not alike"] = said_by(lambda: split(toy(), stages=3))
    said["no such point"] = said_by(lambda: split(toy(), split_points=["layers.9"]))
    said["no such weight"] = said_by(lambda: split(toy(), shared_weights=[("table.weight", "head.weight")]))
    said["weight on no rank"] = said_by(lambda: split(Spare(), shared_weights=[("table.weight", "spare.weight")]))
    said["other shape"] = said_by(lambda: split(toy(), shared_weights=[("table.weight", "layers.0.weight")]))
    said["key"] = said_by(lambda: split(toy(), {**batch, "colour": batch["ids"]}))
    said["other model"] = said_by(lambda: split(nn.Sequential(*toy().layers) if rank else toy(), split_points=None))
    said["deeper model"] = said_by(lambda: split(deeper() if rank else toy()))
    said["replicas"] = said_by(lambda: split(toy(), replicas=1 + rank))
    said["three replicas"] = said_by(lambda: split(toy(), replicas=3))
    part = split(toy())
    pipeline = Pipeline(part, None, toy_loss, timeout_s=30)
    said["precision"] = said_by(lambda: Pipeline(part, None, toy_loss, precision="fp8"))
    said["unknown key"] = said_by(lambda: pipeline.step({**batch, "colour": batch["ids"]} if rank else batch))
    said["missing key"] = said_by(lambda: pipeline.step({"labels": batch["labels"]}))
    said["other shapes"] = said_by(lambda: pipeline.step(toy_batch(4, 5 + rank, 0)))
    said["other values"] = said_by(lambda: pipeline.step(toy_batch(4, 5, rank)))
    said["no samples"] = said_by(lambda: pipeline.step(toy_batch(0, 5, 0)))
    said["nested"] = said_by(lambda: pipeline.step({**batch, "labels": {"all": batch["labels"]}}))
    for name, change in LOSSES.items():
        wrong = Pipeline(part, None, lambda output, batch, change=change: change(toy_loss(output, batch)[0]))
        said[name] = said_by(lambda wrong=wrong: wrong.step(batch))
    said["shapes given"] = said_by(lambda: Pipeline(part, None, toy_loss, tensor_shapes=[(2, 3, 8)]))
    said["after all"] = str(pipeline.step(batch).loss.item() > 0)
    with warnings.catch_warnings(record=True) as seen:
        split(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.zeros(2, 8), split_points=["1"])
    said["batch norm"] = " ".join(str(each.message) for each in seen)
    lonely = nn.Linear(3, 3)
    if rank == 0:
        SharedModule([0, 1]).register(lonely)
    said["shared"] = said_by(lambda: Stage(nn.Sequential(lonely), (torch.zeros(2, 3),), timeout_s=30))
    return said


LOSSES = {
    "detached": lambda loss: (loss.detach(), 1),
    "negative count": lambda loss: (loss, -1),
    "count of nothing": lambda loss: (loss, torch.tensor(float("nan"))),
    "no count": lambda loss: (loss, 0),
}


def deeper() -> Toy:
    model = toy()
    model.layers[0] = nn.Sequential(model.layers[0], nn.Linear(8, 8))
    return model


EXPECTED = {
    "twice": "ConfigError: expected the forward to reach the split point cuts.0 once, but it calls it twice",
    "never": "ConfigError: expected the forward to reach every split point, but it never calls forgotten",
    "branch": "control flow or sizes depend on a tensor's values",
    "too few": "ConfigError: expected at least 5 places to divide the model at for 6 stages, got 3",
    "not alike": "ConfigError: expected a number of stages that 2 ranks of a pipeline can share alike, got 3",
    "no such point": "expected the split point 'layers.9' to name one module of the model, got 0",
    "no such weight": "expected shared weights among the model's parameters, got 'head.weight'",
    "weight on no rank": "ConfigError: expected a stage to hold the shared weight spare.weight",
    "other shape": "ConfigError: expected shared weights of one shape, got table.weight of (16, 8)",
    "key": "ConfigError: the batch has the key 'colour', which is none of the model's arguments ids",
    "other model": "Error: ",
    "deeper model": "expected the divided model to be the same on ranks 0, 1, but rank 1 has another than rank 0",
    "replicas": "expected the number of replicas to be the same on ranks 0, 1",
    "three replicas": "expected replicas that divide 2 ranks, got 3",
    "precision": "expected a precision among fp32, bf16, fp16, got 'fp8'",
    "unknown key": "DataError: the batch has the key 'colour', which the model does not know: it takes ids",
    "missing key": "DataError: expected the batch to hold ids, but ids is missing",
    "other shapes": "to be the same on ranks 0, 1, but rank 1 has another than rank 0",
    "other values": "to be the same on ranks 0, 1, but rank 1 has another than rank 0",
    "no samples": "DataError: expected a batch of at least one sample, got none in ids, labels",
    "nested": "DataError: expected tensors by the names of the model's arguments, got a dict of tensors as 'labels'",
    "detached": "DataError: expected a loss that gradients can be taken of, got one without a graph",
    "negative count": "DataError: expected the loss function to return a finite number of losses, at least 0",
    "count of nothing": "DataError: expected the loss function to return a finite number of losses, at least 0",
    "no count": "DataError: expected the loss function to return a finite number of losses, at least 0",
    "shapes given": "expected no tensor_shapes for a part that split_model made",
    "after all": "True",
    "shared": "expected the stages 0, 1 to hold the modules that they share",
}


def test_every_rank_says_what_is_wrong():
    for rank, said in enumerate(run_ranks(refusals, 2, deadline_s=150)):
        for name, expected in EXPECTED.items():
            text = said[name].replace(f"rank {1 - rank}: ", "", 1) if expected not in said[name] else said[name]
            assert expected in text, name
        assert said["batch norm"].startswith("BatchNorm takes its statistics") == (rank == 0), "said once"


class Model(nn.Module):
    def forward(self, x, y=None, *, z=None):
        return x


NAMED = {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("of_batch", "entries", "expected"),
    [
        (False, torch.zeros(2), ["x"]),
        (False, (1, 2), ["x", "y"]),
        (False, (1, 2, 3, 4), ["x", "y", "z"]),
        (False, {"z": 1, "x": 2, "labels": 3}, ["z", "x"]),
        (False, {"y": 1}, ConfigError),
        (False, {"x": 1, "colour": 2}, ConfigError),
        (True, (1, 2), NAMED),
        (True, [1, 2, 3], NAMED | {"labels": 3}),
        (True, NAMED | {"labels": 3}, NAMED | {"labels": 3}),
        (True, (1,), DataError),
        (True, {"x": 1}, DataError),
        (True, NAMED | {"colour": 3}, DataError),
    ],
)
def test_entries_of_an_example_and_of_batches_after_it(of_batch, entries, expected):
    def named() -> Any:
        return Inputs.of(Model(), (1, 2)).name(entries) if of_batch else list(Inputs.of(Model(), entries).names)

    if isinstance(expected, type):
        with pytest.raises(expected):
            named()
    else:
        assert named() == expected
