"""Rows by the rules of other trainers: small cases worked out by hand from their sources, and what they cost."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.dp_balanced import DpBalanced, dp_balanced
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.scheduling import schedule_batch
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.tools.rivals.methods import Longest, method_settings, predict
from megatron_dynapipe.ways.rivals.rules import RIVALS, Room, differencing, row_sizes
from tests.core.planner_cases import batch_of
from tests.tools.rivals.test_methods import model

Rows = list[list[int]]
RULES = RIVALS | {"dp_balanced": dp_balanced}


def rows(name: str, lengths: list[int], replicas: int = 1, group: int = 1, positions: int = 10) -> Rows:
    return RULES[name](lengths, Room(positions=positions, replicas=replicas, group=group, hidden_size=4))


@pytest.mark.parametrize(
    ("name", "lengths", "replicas", "group", "expected"),
    [
        pytest.param("dp_balanced", [5, 5, 4, 6], 1, 1, [[0, 1], [2, 3]], id="dp_balanced, as they arrive"),
        pytest.param("dp_balanced", [5, 6, 4], 1, 1, [[0], [1, 2]], id="dp_balanced, a new row"),
        pytest.param("dp_balanced", [2, 2, 2], 2, 1, [[0, 1], [2]], id="dp_balanced, the last sample moves"),
        pytest.param("dp_balanced", [3, 3, 3, 1, 9], 2, 2, [[0, 1], [4], [3], [2]], id="dp_balanced, virtual stages"),
        # Over two replicas {6, 1} and {4, 3}; each as one micro-batch.
        pytest.param("verl", [6, 4, 3, 1], 2, 1, [[0, 3], [1, 2]], id="verl, replicas"),
        # 28 tokens are three micro-batches: {9}, {8, 1}, {7, 3}; the largest (7 + 3) in the middle.
        pytest.param("verl", [9, 8, 7, 3, 1], 1, 1, [[1, 4], [2, 3], [0]], id="verl, light ones at both ends"),
        pytest.param("slime", [9, 8, 7, 3, 1], 1, 1, [[0], [1, 4], [2, 3]], id="slime"),
        # One of 10 positions becomes two for two replicas: 4 | 3, then 2 and 1 to the lesser: {4, 1}, {3, 2}.
        pytest.param("slime", [4, 3, 2, 1], 2, 1, [[0, 3], [1, 2]], id="slime, split in two"),
    ],
)
def test_rows_by_hand(name: str, lengths: list[int], replicas: int, group: int, expected: Rows) -> None:
    found = rows(name, lengths, replicas, group)
    assert sorted(found) == sorted(expected) if name == "slime" else found == expected


def test_what_a_rule_does_not_serve_is_refused() -> None:
    assert rows("dp_balanced", [9, 9, 9], replicas=2) == rows("slime", [9, 9, 9], replicas=2) == []
    run, costs = model(ModelFamily.GPT)
    run = msgspec.structs.replace(run, data_parallel=2, chunks=2)
    message = "the rule cannot make a multiple of 4 micro-batches of 3 samples"
    with pytest.raises(PlanningError, match=message):
        predict("slime", batch_of((9, 0), (9, 0), (9, 0)), Longest(8, 0), run, costs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dp_balanced", [[[0], [2]], [[1], [3]]]),  # row i on replica i mod 2
        ("verl", [[[0], [3]], [[1], [2]]]),  # 9 + 6 and 8 + 7, the largest first where there are two
        ("slime", [[[0], [3]], [[2], [1]]]),  # 7 + 6, 9, 8; the first split in two; then 9 + 6 and 8 + 7
    ],
)
def test_replicas_by_hand(name: str, expected: list[Rows]) -> None:
    found = rows(name, [9, 8, 7, 6], replicas=2)
    assert sorted(found[replica::2] for replica in range(2)) == expected


def test_sizes_of_rows() -> None:
    assert [*row_sizes([64, 26], 64, 1)] == [64, 72, 80, 88, 96], "an eighth of the longest apart, until one holds all"
    assert [*row_sizes([30], 64, 8)] == [8, 16, 24, 32]
    assert [*row_sizes([13], 64, 16)] == [4, 8, 12, 16]
    assert [*row_sizes([6, 1], 6, 1)] == [6, 7]
    assert [*row_sizes([1] * 40, 16, 1)][-4:] == [34, 36, 38, 40], "a sixteenth of themselves where that is more"


@pytest.mark.parametrize(
    ("name", "lengths", "counts"),
    [
        # Rows of 512 hold one of 300, of 640 two; three of 512 are refused, as no multiple of two replicas.
        ("dp_balanced", [300] * 3, [(2, 1)]),
        ("dp_balanced", [300] * 8, [(1,) * 8, (2,) * 4, (3, 3, 1, 1), (4, 4), (5, 3), (6, 2), (7, 1)]),
        ("verl", [300] * 8, [(1, 1, 2) * 2, (2,) * 4, (4, 4)]),
        # Rows may be shorter than the longest sample: of 128 they hold one each, of 512 three and a half.
        ("slime", [512, 100, 100, 100, 100, 100], [(1,) * 6, (1, 1, 2, 2), (1, 5)]),
    ],
)
def test_of_all_sizes_and_of_its_own_replicas_and_better_ones_a_rival_has_the_fastest(name, lengths, counts) -> None:
    settings, costs = model(ModelFamily.GPT)
    run = msgspec.structs.replace(settings, data_parallel=2)
    run = method_settings("slime" if name == "dp_balanced" else name, Longest(512, 0), run)
    if name == "dp_balanced":
        run = msgspec.structs.replace(run, partition=DpBalanced(longest=512))
    planner, batch = planner_of(run, costs), batch_of(*((n + 1, 0) for n in lengths))
    problem = planner.problem(planner.samples(batch))
    offered = run.partition.partitions(problem, np.arange(len(lengths)), hidden_size=64)
    assert {tuple(sorted(one.sizes.tolist())) for one in offered.partitions} == {tuple(sorted(each)) for each in counts}
    predicted = []
    for one in offered.partitions:
        found = schedule_batch(problem, replace(offered, partitions=(one,)), run.schedule, searchable=False)
        assert found is not None
        predicted.append(found.makespan_ns)
        assert not one.in_turn or [*map(list, found.replicas)] == [[*range(r, len(one.sizes), 2)] for r in range(2)]
    assert {one.in_turn for one in offered.partitions} == {True, False}
    assert planner.plan(batch, 0).totals.predicted_ns == min(predicted)


def test_differencing() -> None:
    """8 - 7, 6 - 5 and 4 leave 1, 1 and 4, then 3 and 1, then 2: Karmarkar and Karp's own example."""
    work = [8, 7, 6, 5, 4]
    assert sorted(sum(work[i] for i in part) for part in differencing(work, 2)) == [14, 16]
    assert sorted(differencing([1, 2, 3, 10], 2, equal_counts=True)) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(1, 10), min_size=8, max_size=40), st.integers(1, 4), st.sampled_from(sorted(RULES)))
def test_every_sample_is_in_one_row(lengths: list[int], replicas: int, name: str) -> None:
    found = rows(name, lengths, replicas, positions=20)
    assert sorted(sample for row in found for sample in row) == list(range(len(lengths)))
    assert all(found) and (len(found) % replicas == 0)
    if name == "dp_balanced":  # The others balance work, and may exceed a row.
        assert all(sum(lengths[i] for i in row) <= 20 for row in found)
