"""Ranks that share no layer measure points of their own; all of them know what was found."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.integration.profiling.layers import Forward, MeasuredModule
from megatron_dynapipe.integration.profiling.measure import Values, at_once, largest_that_fits, measured_by_ranks
from tests.helpers.processes import run_ranks


def _prepare(point: object) -> Forward:
    raise AssertionError("not run")


PART = MeasuredModule(name="encoder", module=torch.nn.Identity(), prepare=_prepare)


def plain(values: Values | None) -> tuple[int, ...] | None:
    """As a rank can hand it back."""
    return None if values is None else tuple(values)


def in_turns(rank: int, world_size: int) -> dict[str, object]:
    """What three calls give, the second of fewer points than ranks, and which points this rank ran."""
    dist.init_process_group("gloo")
    ran = []

    def run(part: MeasuredModule, *, point: int) -> Values:
        ran.append(point)
        if point == 5:
            raise torch.OutOfMemoryError("too much")
        return Values(point, rank, 7, 8)

    def measure(point: int) -> Values | None:
        return largest_that_fits(PART, partial(run, point=point), shared=False)

    points = [[1, 2], [3], [4, 5]]
    found = [
        measured_by_ranks([partial(measure, point) for point in some], turn=turn, shared=False)
        for turn, some in enumerate(points)
    ]
    return {"at_once": at_once(shared=False), "found": [list(map(plain, some)) for some in found], "ran": ran}


def together(rank: int, world_size: int, too_large_for: int) -> list[object]:
    dist.init_process_group("gloo")

    def run(part: MeasuredModule) -> Values:
        if rank == too_large_for:
            raise torch.OutOfMemoryError("too much")
        return Values(2 * rank, 4, 10 * (rank + 1), 100 - rank)

    measure = partial(largest_that_fits, PART, run, shared=True)
    return [at_once(shared=True), *map(plain, measured_by_ranks([measure], turn=0, shared=True))]


def test_ranks_take_turns_and_all_know_what_was_found() -> None:
    first, second = run_ranks(in_turns, 2)
    expected = [[(1, 0, 7, 8), (2, 1, 7, 8)], [(3, 1, 7, 8)], [(4, 0, 7, 8), None]]
    assert first["found"] == second["found"] == expected
    assert first["at_once"] == 2
    assert (first["ran"], second["ran"]) == ([1, 4], [2, 3, 5]), "in the second turn the other rank is the first"


@pytest.mark.parametrize(("too_large_for", "found"), [(-1, (1, 4, 20, 100)), (1, None)])
def test_ranks_that_share_a_layer_measure_it_together(too_large_for: int, found: object) -> None:
    assert run_ranks(together, 2, {"too_large_for": too_large_for}) == [[1, found]] * 2


def test_one_layer_is_measured_where_several_do_not_fit() -> None:
    part = replace(PART, layers=4, alone=PART)

    def run(each: MeasuredModule, *, most: int) -> Values:
        if each.layers > most:
            raise torch.OutOfMemoryError("too much")
        return Values(each.layers, 0, 0, 0)

    fits = {most: largest_that_fits(part, partial(run, most=most), shared=False) for most in (4, 1, 0)}
    assert fits == {4: (4, 0, 0, 0), 1: (1, 0, 0, 0), 0: None}
