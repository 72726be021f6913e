"""Rows by the rules of other trainers: small cases worked out by hand from their sources, and what they cost."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import InfeasibleError, PlanningError
from megatron_dynapipe.core.scheduling import schedule_batch
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.tools.rivals.dynamic_cp import RowsRun, dynamic_cp, fastest_run
from megatron_dynapipe.tools.rivals.methods import Longest, method_settings, predict
from megatron_dynapipe.tools.rivals.padded_rows import fastest_padded
from megatron_dynapipe.tools.rivals.rules import PADDED, RIVALS, Room, differencing, row_sizes
from tests.core.planner_cases import batch_of
from tests.tools.rivals.test_methods import model

Rows = list[list[int]]


def rows(name: str, lengths: list[int], replicas: int = 1, group: int = 1, positions: int = 10) -> Rows:
    return (RIVALS | PADDED)[name](lengths, Room(positions=positions, replicas=replicas, group=group, hidden_size=4))


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
        # 6 has a 4 put to it, 7 no other (two of 2 are too many), but the largest that fits, a 3; 2, 2 and 1 are left.
        pytest.param("nemo_rl", [7, 2, 4, 6, 3, 2, 1], 1, 1, [[0, 4], [3, 2], [1, 5, 6]], id="nemo_rl"),
        pytest.param("nemo_rl", [6, 2, 2, 3], 1, 1, [[0, 1, 2], [3]], id="nemo_rl, a pair of small ones"),
        pytest.param("nemo_rl", [3, 3, 3, 4], 3, 1, [[2], [3, 0], [1]], id="nemo_rl, the last sample moves"),
    ],
)
def test_rows_by_hand(name: str, lengths: list[int], replicas: int, group: int, expected: Rows) -> None:
    found = rows(name, lengths, replicas, group)
    assert sorted(found) == sorted(expected) if name == "slime" else found == expected


def test_rows_of_a_fixed_shape_cost_their_padding() -> None:
    """Megatron-LM's of the most positions, NeMo-RL's of the longest row; neither is faster than rows that end."""
    settings, costs = model(ModelFamily.GPT)
    planner = planner_of(method_settings("packed_rows", Longest(512, 0), settings), costs)
    samples = planner.samples(batch_of(*((n + 1, 0) for n in (300, 300, 100, 40))))
    shapes, times = {}, {}
    for rival in PADDED:
        run = fastest_padded(rival, planner, samples, [512])
        shapes[rival], times[rival] = [tuple(shape) for shape in run.shapes], run.makespan_ns
    assert shapes == {"nemo_rl": [(1, 440, 0)] * 2, "megatron_fixed_shape": [(1, 512, 0)] * 2}
    alone = planner.plan(batch_of(*((n + 1, 0) for n in (300, 300, 100, 40))), 0).totals.predicted_ns
    assert alone <= min(times.values())
    with pytest.raises(InfeasibleError, match="no rows of nemo_rl fit"):
        fastest_padded("nemo_rl", planner, samples, [])


def test_what_a_rule_does_not_serve_is_refused() -> None:
    assert rows("dp_balanced", [9, 9, 9], replicas=2) == rows("slime", [9, 9, 9], replicas=2) == []
    run, costs = model(ModelFamily.GPT)
    run = msgspec.structs.replace(run, data_parallel=2, chunks=2)
    message = "dp_balanced cannot make a multiple of 4 micro-batches of 3 samples"
    with pytest.raises(PlanningError, match=message):
        predict("dp_balanced", batch_of((9, 0), (9, 0), (9, 0)), Longest(8, 0), run, costs)
    with pytest.raises(PlanningError, match="default_dynamic_cp is not predicted with virtual stages"):
        predict("default_dynamic_cp", batch_of((9, 0), (9, 0), (9, 0)), Longest(8, 0), run, costs)
    with pytest.raises(PlanningError, match="a sample of 21 positions does not fit 2 rows of 10"):
        dynamic_cp([21, 3], 10, 2)


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
    run = method_settings(name, Longest(512, 0), msgspec.structs.replace(settings, data_parallel=2))
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


@given(st.lists(st.integers(1, 10), min_size=8, max_size=40), st.integers(1, 4), st.sampled_from(sorted(RIVALS)))
def test_every_sample_is_in_one_row(lengths: list[int], replicas: int, name: str) -> None:
    found = rows(name, lengths, replicas, positions=20)
    assert sorted(sample for row in found for sample in row) == list(range(len(lengths)))
    assert all(found) and (len(found) % replicas == 0)
    if name == "dp_balanced":  # The others balance work, and may exceed a row.
        assert all(sum(lengths[i] for i in row) <= 20 for row in found)


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        # The 5 does not fit beside the 6, the first 4 fills their row, and the 5 shares the next with the other 4.
        pytest.param([4, 6, 5, 4], 1, [[(1, [1, 0])], [(1, [2, 3])]], id="one rank"),
        # 8 and 4 do not share a row of 10; both 4 do, beside the 64 of the 8, which stays the most.
        pytest.param([8, 4, 4], 2, [[(1, [0]), (1, [1, 2])]], id="rows beside one another"),
        # 16 needs two ranks, work 128 on each. A 4 has one of its own (a row of two would also leave 128, no less);
        # so has the other, which fits its row; 3 does not (11 positions), and begins another.
        pytest.param([16, 4, 4, 3], 4, [[(2, [0]), (1, [1, 2]), (1, [3])]], id="a long one over two ranks"),
        # 6: work 36. The 5 takes the other rank. 4: with either 52 or 41 on one: 41. 3: 45 or 50: 45.
        pytest.param([6, 5, 4, 3], 2, [[(1, [0, 3]), (1, [1, 2])]], id="where it is least busy"),
        # The first gets no more ranks than it needs, but what is idle at the end widens it.
        pytest.param([6], 4, [[(4, [0])]], id="idle ranks widen a row, twice"),
        pytest.param([9, 2], 4, [[(2, [0]), (2, [1])]], id="idle ranks widen the first and then the next"),
        # Of three ranks one is idle, and the first row gets it.
        pytest.param([9, 9], 3, [[(2, [0]), (1, [1])]], id="three ranks"),
        # Four ranks and two of seven: the two cannot become four, so all share what fits: 31 / 7 + 16 / 7.
        pytest.param([31, 16], 7, [[(7, [0, 1])]], id="all ranks where doubling does not come out"),
    ],
)
def test_groups_by_hand(lengths: list[int], ranks: int, expected: list[list[tuple[int, list[int]]]]) -> None:
    found = dynamic_cp(lengths, 10, ranks)
    assert [[(group.ranks, group.samples) for group in groups] for groups in found] == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.sampled_from([2, 3, 4, 8]))
def test_no_rank_is_idle_and_every_sample_has_one_row(lengths: list[int], ranks: int) -> None:
    found = dynamic_cp(lengths, 20, ranks)
    assert sorted(sample for groups in found for group in groups for sample in group.samples) == [*range(len(lengths))]
    for groups in found:
        assert sum(group.ranks for group in groups) == ranks
        assert all(sum(lengths[i] for i in group.samples) / group.ranks <= 20 for group in groups)


def test_a_divided_sample_costs_each_rank_its_share() -> None:
    settings, costs = model(ModelFamily.GPT)

    def run(data_parallel: int, *lengths: int) -> RowsRun:
        planner = planner_of(msgspec.structs.replace(settings, data_parallel=data_parallel), costs)
        return fastest_run(planner, planner.samples(batch_of(*((n + 1, 0) for n in lengths))), [512])

    whole, divided = run(1, 512, 512), run(2, 1024, 1024)
    assert [shape.input_length for shape in divided.shapes] == [512] * 4
    assert whole.makespan_ns < divided.makespan_ns < 2 * whole.makespan_ns, "its attention is that of 1,024 positions"
    assert run(2, 512, 512, 512, 512).makespan_ns == whole.makespan_ns
