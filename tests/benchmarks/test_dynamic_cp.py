"""Megatron-LM's context parallelism by length: small cases worked out by hand from its source, and what they cost."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.dynamic_cp import RowsRun, dynamic_cp, fastest_run
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.units import ModelFamily
from tests.core.planner_cases import batch_of
from tests.tools.rivals.test_methods import model


def test_what_it_does_not_serve_is_refused() -> None:
    run, costs = model(ModelFamily.GPT)
    planner = planner_of(msgspec.structs.replace(run, data_parallel=2, chunks=2), costs)
    with pytest.raises(PlanningError, match="default_dynamic_cp is not predicted with virtual stages"):
        fastest_run(planner, planner.samples(batch_of((9, 0), (9, 0))), [8])
    with pytest.raises(PlanningError, match="a sample of 21 positions does not fit 2 rows of 10"):
        dynamic_cp([21, 3], 10, 2)


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
