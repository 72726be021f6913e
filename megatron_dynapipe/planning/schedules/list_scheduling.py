"""List scheduling: every stage takes the next pass that can start, within its memory.

Passes keep one sequence on all stages, forward and backward, so that a stage only ever chooses between *the* next
forward and *the* next backward. With several chunks it is that of interleaved 1F1B; under the rule that prefers
backward passes smaller groups of micro-batches pass a chunk together, so that a search has both. A stage takes the
pass that can start first; a `Rule` breaks ties. A forward is admitted while fewer than `depth` forwards of the stage
wait for their backward, and its peak fits beside what they keep; where peaks cover the backward, what it keeps must
besides leave room for every backward.

With one chunk, the oldest micro-batch in flight is never held up by younger ones, and each fits alone: list scheduling
ends under every rule but the strict one, which can wait for a forward that never comes. With several, stages short of
memory can also wait for each other, since a later chunk of the oldest needs room too.

The native core schedules (`csrc/schedule/list_schedule.cpp`), since a search does so thousands of times per plan. The
schedule `adaptive` is the best of 1F1B and a few list schedules, for micro-batches in a given order. Where the planner
also partitions the batch, the search (`planning.search`) begins with these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_dynapipe.plan.instructions import Backward, Forward, Pass
from megatron_dynapipe.planning.native import NEVER, agree, core
from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem
from megatron_dynapipe.planning.schedules.one_f_one_b import filling_depths, one_f_one_b_within_memory, sequences
from megatron_dynapipe.planning.simulate import simulate_all

DEEPENINGS = (0, 1, 3, 8)
"""Micro-batches in flight beyond those that fill the pipeline, as tried by `adaptive`."""


class Rule(IntEnum):
    """Which pass a stage takes where its next forward and its next backward could both start."""

    BACKWARD_FIRST = 0
    FORWARD_FIRST = 1
    STRICT = 2
    """1F1B: wait for the forward until `depth` are in flight, and for the backward then."""


agree("Rule", {rule.name: rule.value for rule in Rule})


@dataclass(frozen=True, slots=True)
class Policy:
    """How list scheduling chooses."""

    depths: tuple[int, ...]
    """Per stage, most forwards ahead of its backwards; with several chunks, beyond `forwards_of_earlier_chunks`."""
    rule: Rule


def list_schedule(problem: ScheduleProblem, policy: Policy) -> PassOrder | None:
    """The order in which stages take passes under a policy, in the problem's own predicted times.

    None where a micro-batch does not fit a stage's memory even alone, and where stages wait for each other for ever.
    """
    makespan, forwards = core.list_schedule(
        problem.cost_arrays,
        problem.chunks,
        problem.model_state_bytes,
        problem.memory_limit_bytes,
        problem.forward_only,
        np.array(policy.depths, np.int64),
        int(policy.rule),
        problem.peak_covers_backward,
    )
    if makespan >= NEVER:
        return None
    return order_of(np.array(forwards).reshape(problem.stages, -1).tolist(), problem, policy.rule)


def order_of(forwards: Sequence[Sequence[int]], problem: ScheduleProblem, rule: Rule) -> PassOrder:
    """The passes of every stage from 1 per forward and 0 per backward, as the native core returns them."""
    in_order = sequences(problem.micro_batches, problem.stages, problem.chunks, full=rule is not Rule.BACKWARD_FIRST)
    return tuple(_passes(stage, *in_order) for stage in forwards)


def _passes(taken: Sequence[int], forwards: Sequence[Forward], backwards: Sequence[Backward]) -> tuple[Pass, ...]:
    forward, backward = iter(forwards), iter(backwards)
    return tuple(next(forward) if is_forward else next(backward) for is_forward in taken)


def adaptive(problem: ScheduleProblem) -> PassOrder:
    """The best of (interleaved) 1F1B and the list schedules of a few policies, for the micro-batches in index order."""
    plain = one_f_one_b_within_memory(problem)
    scheduled = [order for policy in policies(problem) if (order := list_schedule(problem, policy)) is not None]
    runs = simulate_all(problem, (plain, *scheduled))
    fitting = [(run, order) for run, order in runs if max(run.peak_bytes) <= problem.memory_limit_bytes]
    return min(fitting or runs, key=lambda candidate: candidate[0].makespan_ns)[1]


def policies(problem: ScheduleProblem) -> list[Policy]:
    """Policies to try: every rule, at 1F1B's depths and deeper; the last stage turns each micro-batch round at once."""
    base = filling_depths(problem.stages, problem.chunks)
    return [Policy((*(depth + extra for depth in base[:-1]), 1), rule) for extra in DEEPENINGS for rule in Rule]
