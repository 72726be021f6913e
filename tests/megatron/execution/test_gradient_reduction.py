"""When bucket groups are reduced: one by one while a chunk's last second half runs, in the order of their numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Instruction
from megatron_dynapipe.core.units import ModelFamily
from tests.core.planner_cases import settings


class Group:
    """A bucket group that notes when its reduction starts."""

    def __init__(self, name: str, params: set[torch.Tensor], notes: list[str]) -> None:
        self.name, self.params, self._notes = name, params, notes
        self.grad_reduce_handle: object | None = None
        self.grad_reduce_finished, self.is_first_batch = False, False

    def start_grad_sync(self, *, force_all_reduce: bool) -> None:
        self.grad_reduce_handle = object()
        self._notes.append(self.name)


def reduction(instructions: list[Instruction], notes: list[str], *, at_end: bool = False) -> tuple[Any, Any]:
    """Of a model of two buckets of two linears each, the last layer's first, and one of experts; and its weights."""
    from megatron_dynapipe.megatron.execution.forward_backward import _GradientReduction

    weights = [torch.zeros(1) for _ in range(5)]
    norm = torch.zeros(1)
    model = SimpleNamespace(
        bucket_groups=[Group("last", {*weights[3:], norm}, notes), Group("first", set(weights[:2]), notes)],
        expert_parallel_bucket_groups=[Group("experts", {weights[2]}, notes)],
        ddp_config=SimpleNamespace(num_distributed_optimizer_instances=1),
    )
    config = SimpleNamespace(no_sync_func=lambda: memoryview(b""), grad_sync_func=None)
    flags = {"is_first_stage": True, "forward_only": False, "force_all_reduce": False, "at_end": at_end}
    return _GradientReduction(config, [model], instructions, **flags), weights


def test_groups_start_as_their_weights_are_done():
    notes: list[str] = []
    passes = [BackwardInput(0), BackwardInput(1), BackwardWeight(0), BackwardWeight(1)]
    reductions, weights = reduction(passes, notes)
    with reductions:
        assert reductions.during_weights(BackwardWeight(0)) is None, "more gradients are to come"
        done = reductions.during_weights(BackwardWeight(1))
        for left in reversed(range(5)):  # the model's end first
            done(weights[:left])
            notes.append(str(left))
        reductions.after_weights(BackwardWeight(1))
    assert notes == ["4", "last", "3", "2", "1", "first", "experts", "0"]


@pytest.mark.parametrize("last", [Backward(0), BackwardWeight(0)])
def test_all_start_at_the_end_where_replicas_would_start_in_two_orders(last):
    notes: list[str] = []
    reductions, _ = reduction([last], notes, at_end=True)
    with reductions:
        if isinstance(last, BackwardWeight):
            assert reductions.during_weights(last) is None
            reductions.after_weights(last)
        else:
            reductions.before_backward(last)
        notes.append("end")
    assert notes == ["end", "last", "first", "experts"]


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({}, False),
        ({"split_backward": "auto"}, True),
        ({"split_backward": "auto", "data_parallel": 1}, False),
        ({"split_backward": "auto", "replicas_in_step": 2}, True),
        ({"split_backward": "auto", "replicas_in_step": 4}, False),
        ({"split_backward": "auto", "pipeline_parallel": 1}, False),
    ],
)
def test_replicas_divide_apart_unless_all_run_in_step(changes, apart):
    assert settings(ModelFamily.GPT, **{"data_parallel": 4, "pipeline_parallel": 2, **changes}).divides_apart is apart
