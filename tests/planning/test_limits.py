"""Bounds that no plan can beat, against the best order of passes that there is, and against plans of all kinds."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.errors import InfeasibleError
from megatron_dynapipe.planning.limits import Limits, limits
from megatron_dynapipe.planning.problem import ScheduleProblem
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.units import BatchLayout, ModelFamily, Recompute
from tests.planning.planner_cases import batch_of, planner


def test_what_a_plan_loses_adds_up() -> None:
    assert (
        Limits(devices=50, stages=60, memory=60, micro_batches=80).causes(100)
        == "50% of the limit: stages 10%, memory 0%, micro-batches 20%, order 20%"
    )


@given(
    family=st.sampled_from(ModelFamily),
    pairs=st.lists(st.tuples(st.integers(2, 900), st.integers(1, 200)), min_size=2, max_size=12),
    stages=st.sampled_from([1, 2, 4]),
    replicas=st.integers(1, 2),
    memory=st.sampled_from([2 * 10**9, 6 * 10**7, 3 * 10**7]),
    split=st.sampled_from(["off", "auto"]),
    slices=st.sampled_from(["off", "auto"]),
    layouts=st.sampled_from([(BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)]),
    counting=st.sampled_from([None, 0, 0.1]),
)
@settings(max_examples=25)
def test_no_plan_is_faster_than_its_limits(family, pairs, stages, replicas, memory, split, slices, layouts, counting):
    t5 = family is ModelFamily.T5
    changes = {"split_backward": split, "micro_batch_layouts": layouts, "slices": "off" if t5 else slices}
    changes |= {"pipeline_parallel": stages, "data_parallel": replicas, "memory_limit_bytes": memory}
    lengths = batch_of(*[(first, second * t5) for first, second in pairs])
    if counting is not None and not t5:
        lengths = replace(lengths, labels=(lengths.input_lengths * counting).astype(np.int32))
    try:
        made = planner(family, **changes)
        plan = made.plan(lengths, 0)
    except InfeasibleError:
        return
    ladder = [*limits(made, lengths, plan), plan.totals.predicted_ns]
    assert all(below <= above for below, above in pairwise(ladder)), ladder


def best_makespan(problem: ScheduleProblem) -> int:
    """The least time of any order of whole passes within memory, by branch and bound over the next pass."""
    stages, count = problem.stages, problem.micro_batches
    forward, backward = problem.forward_ns.tolist(), problem.backward_ns.tolist()
    stored, peak = problem.stored_bytes.tolist(), problem.peak_bytes.tolist()
    room = (problem.memory_limit_bytes - problem.model_state_bytes).tolist()
    send, back = problem.forward_transfer_ns.tolist(), problem.backward_transfer_ns.tolist()
    best = [1 << 60]
    every = {(first, row, s) for first in (True, False) for row in range(count) for s in range(stages)}

    def search(free, ready, done, held):  # ready: (is forward, row, stage) → arrival
        if not ready:
            best[0] = min(best[0], max(free))
            return
        work = [0] * stages
        for first, row, stage in every - done:
            work[stage] += forward[row][stage] if first else backward[row][stage]
        if max(f + w for f, w in zip(free, work, strict=True)) >= best[0]:
            return
        starts = {key: max(free[key[2]], at) for key, at in ready.items()}
        least = min(starts[key] + (forward if key[0] else backward)[key[1]][key[2]] for key in ready)
        for key in sorted(ready, key=starts.__getitem__):
            if starts[key] >= least:
                continue  # another pass would have ended before: the schedule is not active
            first, row, stage = key
            if first and held[stage] + peak[row][stage] > room[stage]:
                continue
            end = starts[key] + (forward if first else backward)[row][stage]
            after = {other: at for other, at in ready.items() if other != key}
            if first and stage + 1 < stages:
                after[True, row, stage + 1] = end + send[row][stage]
            elif first:
                after[False, row, stage] = end
            elif stage > 0:
                after[False, row, stage - 1] = end + back[row][stage]
            change = stored[row][stage] if first else -stored[row][stage]
            search(
                (*free[:stage], end, *free[stage + 1 :]),
                after,
                done | {key},
                (*held[:stage], held[stage] + change, *held[stage + 1 :]),
            )

    search((0,) * stages, {(True, row, 0): 0 for row in range(count)}, frozenset(), (0,) * stages)
    return best[0]


@pytest.mark.parametrize(("stages", "lengths"), [(2, (500, 300, 200)), (3, (400, 400, 100)), (2, (800, 90, 90, 80))])
def test_the_best_order_of_a_plans_micro_batches_lies_between_its_limit_and_the_plan(stages, lengths) -> None:
    """Whole passes: the limit counts a drain, and the search comes within 2% of the optimum."""
    made = planner(
        ModelFamily.GPT, encoder_layers=6, pipeline_parallel=stages, recompute=(Recompute.NONE,), slices="off"
    )
    samples = batch_of(*[(n, 0) for n in lengths])
    plan = made.plan(samples, 0)
    problem = made.problem(Samples.of(samples, ModelFamily.GPT))
    (replica,) = plan.replicas
    rows = [np.array(batch.sample_ids) for batch in replica.micro_batches]
    layouts = [batch.layout for batch in replica.micro_batches]
    costs, _ = problem.costs_of(rows, layouts, np.zeros(len(rows), np.int64))
    optimum = best_makespan(costs)
    bounds = limits(made, samples, plan)
    assert bounds.micro_batches <= optimum <= plan.totals.predicted_ns <= optimum * 1.02
