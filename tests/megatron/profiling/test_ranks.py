"""Ranks that share no layer measure points of their own; all of them know what was found."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.megatron.profiling.layers import Forward, MeasuredModule
from megatron_dynapipe.megatron.profiling.measure import Values, at_once, largest_that_fits, measured_by_ranks
from tests.helpers.processes import in_ranks


def _prepare(point: object) -> Forward:
    raise AssertionError("not run")


PART = MeasuredModule(name="encoder", module=torch.nn.Identity(), prepare=_prepare)


@in_ranks(2)
def test_ranks_take_turns_and_all_know_what_was_found(rank: int) -> None:
    """Three calls, the second of fewer points than ranks."""
    dist.init_process_group("gloo")
    ran = []

    def run(part: MeasuredModule, *, point: int) -> Values:
        ran.append(point)
        if point == 5:
            raise torch.OutOfMemoryError("too much")
        return Values(point, rank, 7, 8)

    def measure(point: int) -> Values | None:
        return largest_that_fits(PART, partial(run, point=point), shared=False)

    found = [
        measured_by_ranks([partial(measure, point) for point in points], turn=turn, shared=False)
        for turn, points in enumerate([[1, 2], [3], [4, 5]])
    ]
    assert found == [[(1, 0, 7, 8), (2, 1, 7, 8)], [(3, 1, 7, 8)], [(4, 0, 7, 8), None]]
    assert at_once(shared=False) == 2
    assert ran == [[1, 4], [2, 3, 5]][rank], "in the second turn the other rank is the first"


@pytest.mark.parametrize(("too_large_for", "found"), [(-1, (1, 4, 20, 100)), (1, None)])
@in_ranks(2)
def test_ranks_that_share_a_layer_measure_it_together(rank: int, too_large_for: int, found: object) -> None:
    dist.init_process_group("gloo")

    def run(part: MeasuredModule) -> Values:
        if rank == too_large_for:
            raise torch.OutOfMemoryError("too much")
        return Values(2 * rank, 4, 10 * (rank + 1), 100 - rank)

    assert at_once(shared=True) == 1
    assert measured_by_ranks([partial(largest_that_fits, PART, run, shared=True)], turn=0, shared=True) == [found]


def test_one_layer_is_measured_where_several_do_not_fit() -> None:
    part = replace(PART, layers=4, alone=PART)

    def run(each: MeasuredModule, *, most: int) -> Values:
        if each.layers > most:
            raise torch.OutOfMemoryError("too much")
        return Values(each.layers, 0, 0, 0)

    fits = {most: largest_that_fits(part, partial(run, most=most), shared=False) for most in (4, 1, 0)}
    assert fits == {4: (4, 0, 0, 0), 1: (1, 0, 0, 0), 0: None}
