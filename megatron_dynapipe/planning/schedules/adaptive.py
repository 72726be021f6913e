"""List scheduling: every rank takes the next pass that can start, within its memory.

Micro-batches keep one order on all ranks, forward and backward, so that a rank only ever chooses between *the* next
forward and *the* next backward. It takes the one that can start first; a `Rule` breaks ties. A forward is admitted
while fewer than `depth` micro-batches stand between their forward and their backward on the rank, and its peak fits
beside what they keep. Since the oldest micro-batch in flight is never held up by younger ones, and each fits alone,
list scheduling ends under every rule but the strict one, which can wait for a forward that never comes.

This is the readable statement of the rules and the oracle of the native twin (`csrc/simulate.cpp`), which the order
search runs thousands of times per plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_dynapipe.plan.instructions import Backward, Forward, Pass
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.problem import PassOrder, PipelineProblem
from megatron_dynapipe.planning.schedules.one_f_one_b import default_depths, one_f_one_b_within_memory
from megatron_dynapipe.planning.simulate import cost_arrays, simulate

DEEPENINGS = (0, 1, 3, 8)
"""Micro-batches in flight beyond those that fill the pipeline, as tried by `adaptive`."""


class Rule(IntEnum):
    """Which pass a rank takes where its next forward and its next backward could both start."""

    BACKWARD_FIRST = 0
    FORWARD_FIRST = 1
    STRICT = 2
    """1F1B: wait for the forward until `depth` micro-batches are in flight, and for the backward then."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How list scheduling chooses."""

    depths: tuple[int, ...]
    """Per rank, most micro-batches between their forward and their backward."""
    rule: Rule


def adaptive(problem: PipelineProblem) -> PassOrder:
    """The best of 1F1B and the list schedules of a few policies, for the micro-batches in index order.

    With several chunks per rank, interleaved 1F1B.
    """
    plain = one_f_one_b_within_memory(problem)
    if problem.chunks > 1:
        return plain
    scheduled = [order for policy in policies(problem) if (order := list_schedule(problem, policy)) is not None]
    runs = [(simulate(problem, order), order) for order in (plain, *scheduled)]
    fitting = [(run, order) for run, order in runs if max(run.peak_bytes) <= problem.memory_limit_bytes]
    return min(fitting or runs, key=lambda candidate: candidate[0].makespan_ns)[1]


def policies(problem: PipelineProblem) -> list[Policy]:
    """Policies to try: every rule, at 1F1B's depths and deeper; the last rank turns each micro-batch round at once."""
    base = default_depths(problem)
    return [Policy((*(depth + extra for depth in base[:-1]), 1), rule) for extra in DEEPENINGS for rule in Rule]


def list_schedule(problem: PipelineProblem, policy: Policy) -> PassOrder | None:
    """The order in which ranks take passes under a policy, in the problem's own predicted times.

    None where a micro-batch does not fit a rank's memory even alone, and where a strict policy stalls: a rank waits
    for a forward that one before it has no memory for.
    """
    if NATIVE is None:
        return list_schedule_in_python(problem, policy)
    depths = np.array(policy.depths, np.int64)
    makespan, forwards = NATIVE.list_schedule(
        cost_arrays(problem),
        problem.model_state_bytes,
        problem.memory_limit_bytes,
        problem.forward_only,
        depths,
        int(policy.rule),
    )
    if not makespan < _NEVER // 2:
        return None
    return tuple(map(passes_of, np.array(forwards).reshape(problem.stages, -1).tolist()))


def list_schedule_in_python(problem: PipelineProblem, policy: Policy) -> PassOrder | None:
    """The Python twin of `list_schedule`."""
    assert problem.chunks == 1
    if (problem.peak_bytes + problem.model_state_bytes > problem.memory_limit_bytes).any():
        return None
    run = _Run(problem, policy)
    total = problem.micro_batches * (1 if problem.forward_only else 2) * problem.stages
    for rank in range(problem.stages):
        run.choose(rank)
    for _ in range(total):
        rank = min(range(problem.stages), key=lambda rank: run.ranks[rank].start)
        if run.ranks[rank].start >= _NEVER:
            return None
        run.step(rank)
    return tuple(tuple(rank.passes) for rank in run.ranks)


_NEVER = 2**62


class _Rank:
    """One rank's progress: passes that have run, and the one to run next."""

    def __init__(self, held: int) -> None:
        self.passes: list[Pass] = []
        self.forwards = self.backwards = self.free = 0
        self.held = held
        self.start = _NEVER
        self.next_is_forward = True


class _Run:
    def __init__(self, problem: PipelineProblem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.ranks = [_Rank(held) for held in problem.model_state_bytes.tolist()]
        self.forward, self.backward = problem.forward_ns.tolist(), problem.backward_ns.tolist()
        self.stored, self.peak = problem.stored_bytes.tolist(), problem.peak_bytes.tolist()
        self.input_ready: list[dict[int, int]] = [{} for _ in self.ranks]
        self.gradient_ready: list[dict[int, int]] = [{} for _ in self.ranks]
        self.input_ready[0] = dict.fromkeys(range(problem.micro_batches), 0)

    def choose(self, rank: int) -> None:
        """Set what a rank runs next, as far as it can know."""
        at, problem = self.ranks[rank], self.problem
        in_flight = at.forwards - at.backwards
        admitted = at.forwards < problem.micro_batches and (
            problem.forward_only
            or (
                in_flight < self.policy.depths[rank]
                and at.held + self.peak[at.forwards][rank] <= problem.memory_limit_bytes
            )
        )
        forward = backward = _NEVER
        if admitted and (ready := self.input_ready[rank].get(at.forwards)) is not None:
            forward = max(at.free, ready)
        waits_for_forward = admitted and self.policy.rule is Rule.STRICT
        if not waits_for_forward and (ready := self.gradient_ready[rank].get(at.backwards)) is not None:
            backward = max(at.free, ready)
        first = self.policy.rule is Rule.FORWARD_FIRST
        at.next_is_forward = forward < backward or (forward == backward and first)
        at.start = min(forward, backward)

    def step(self, rank: int) -> None:
        """Run a rank's next pass and look again at those whom it concerns."""
        at, last = self.ranks[rank], len(self.ranks) - 1
        if at.next_is_forward:
            row = at.forwards
            at.forwards += 1
            at.free = at.start + self.forward[row][rank]
            at.passes.append(Forward(row))
            if not self.problem.forward_only:
                at.held += self.stored[row][rank]
            if rank < last:
                arrival = at.free + int(self.problem.forward_transfer_ns[row, rank])
                self.input_ready[rank + 1][row] = arrival
                self.choose(rank + 1)
            elif not self.problem.forward_only:
                self.gradient_ready[rank][row] = at.free
        else:
            row = at.backwards
            at.backwards += 1
            at.free = at.start + self.backward[row][rank]
            at.passes.append(Backward(row))
            at.held -= self.stored[row][rank]
            if rank > 0:
                arrival = at.free + int(self.problem.backward_transfer_ns[row, rank])
                self.gradient_ready[rank - 1][row] = arrival
                self.choose(rank - 1)
        self.choose(rank)


def passes_of(forwards: Sequence[int]) -> tuple[Pass, ...]:
    """A rank's passes from 1 per forward and 0 per backward, as the native twin returns them."""
    forward = backward = 0
    passes: list[Pass] = []
    for is_forward in forwards:
        if is_forward:
            passes.append(Forward(forward))
            forward += 1
        else:
            passes.append(Backward(backward))
            backward += 1
    return tuple(passes)
