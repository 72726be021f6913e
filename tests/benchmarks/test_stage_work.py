"""The bound of plans of one stage, against all plans of small batches."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.stage_work import StageWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from tests.core.planner_cases import KERNEL_RATES, batch_of, cost_model, of_padded_costs, planner
from tests.core.planner_cases import settings as settings_of

_ONE_STAGE = {"pipeline_parallel": 1, "data_parallel": 2, "slices": "off"}


def fastest(made: Planner, samples: Samples) -> int | None:
    """The least time of the slower of two replicas over all rows, modes and assignments; None where nothing fits."""
    problem = made.problem(samples)
    count = len(samples.ids)
    rows = [rows for size in range(1, count + 1) for rows in combinations(range(count), size)]
    times: dict[frozenset[int], int] = {}
    for layout in problem.batch_layouts:
        for mode in range(len(problem.modes)):
            members = [np.array(row, np.int64) for row in rows]
            costs, covered = problem.costs_of(members, [layout] * len(rows), np.full(len(rows), mode))
            fits = costs.peak_bytes[:, 0] + made.model_state_bytes[0] <= made.settings.memory_limit_bytes
            for row, time, runs in zip(rows, costs.stage_times_ns[:, 0].tolist(), covered & fits, strict=True):
                if runs:
                    times[frozenset(row)] = min(time, times.get(frozenset(row), time))

    @cache
    def of_replica(held: frozenset[int]) -> float:
        if not held:
            return 0
        first = min(held)
        return min(
            (time + of_replica(held - row) for row, time in times.items() if first in row and row <= held),
            default=np.inf,
        )

    everything = frozenset(range(count))
    slower = (max(of_replica(frozenset(row)), of_replica(everything - set(row))) for row in rows)
    least = min(slower)
    return None if np.isinf(least) else int(least)


@given(
    family=st.sampled_from(ModelFamily),
    pairs=st.lists(st.tuples(st.integers(2, 900), st.integers(1, 200)), min_size=2, max_size=5),
    memory=st.sampled_from([2 * 10**9, 6 * 10**7, 3 * 10**7]),
    layouts=st.sampled_from([(BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)]),
    counting=st.sampled_from([None, 0.1]),
    derived=st.booleans(),
)
@settings(max_examples=40)
def test_no_rows_of_one_stage_are_faster_than_their_bound(family, pairs, memory, layouts, counting, derived) -> None:
    t5 = family is ModelFamily.T5
    lengths = batch_of(*[(first, second * t5) for first, second in pairs])
    if counting is not None and not t5:
        lengths = replace(lengths, labels=(lengths.input_lengths * counting).astype(np.int32))
    try:
        made = planner(family, micro_batch_layouts=layouts, memory_limit_bytes=memory, **_ONE_STAGE)
        made = of_padded_costs(made) if derived else made
    except InfeasibleError:
        return
    samples = made.samples(lengths)
    least = fastest(made, samples)
    assert least is None or StageWork(made, samples).on_one_stage() <= least


@pytest.mark.parametrize("overhead_us", [10.0, 30.0, 100.0])
@pytest.mark.parametrize("lengths", [(10, 10), (10, 18, 26), (10, 10, 34)])
def test_short_rows_that_are_derived_from_padded_costs_are_priced_as_rounded_up(lengths, overhead_us) -> None:
    """Nine positions are priced as sixteen, a part of which is less than nine of nine: bounds were 5% too high."""
    rates = msgspec.structs.replace(KERNEL_RATES, layer_overhead_us=overhead_us, sharpness=1.0)
    chosen = settings_of(ModelFamily.GPT, micro_batch_layouts=(BatchLayout.PACKED,), **_ONE_STAGE)
    made = of_padded_costs(planner_of(chosen, cost_model(ModelFamily.GPT, rates=rates)))
    samples = made.samples(batch_of(*[(length, 0) for length in lengths]))
    least = fastest(made, samples)
    assert least is not None and StageWork(made, samples).on_one_stage() <= least


def test_a_replica_of_one_row_is_bounded_by_rows_of_that_length() -> None:
    """Of one row each, not of rows as long as memory holds, which run better."""
    made = planner(
        ModelFamily.GPT, micro_batch_layouts=(BatchLayout.PACKED,), recompute=(Recompute.NONE,), **_ONE_STAGE
    )
    samples = made.samples(batch_of(*[(64, 0)] * 4))
    work = StageWork(made, samples)
    bound = work.on_one_stage()
    least = fastest(made, samples)
    assert least is not None
    assert work.everywhere(work.fitting_time) < bound <= least < 1.05 * bound
