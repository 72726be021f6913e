"""List scheduling: every rank takes the next pass that can start, within its memory.

Micro-batches keep one order on all ranks, forward and backward, so that a rank only ever chooses between *the* next
forward and *the* next backward. It takes the one that can start first; a `Rule` breaks ties. A forward is admitted
while fewer than `depth` micro-batches stand between their forward and their backward on the rank, and its peak fits
beside what they keep; where peaks cover the backward, what it keeps must besides leave room for every backward. Since
the oldest micro-batch in flight is never held up by younger ones, and each fits alone, list scheduling ends under
every rule but the strict one, which can wait for a forward that never comes.

This is the readable statement of the rules and the oracle of the native twin (`csrc/simulate.cpp`), which the order
search runs thousands of times per plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

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
        problem.peak_covers_backward,
    )
    if makespan >= NEVER:
        return None
    return tuple(map(passes_of, np.array(forwards).reshape(problem.stages, -1).tolist()))


def list_schedule_in_python(problem: PipelineProblem, policy: Policy) -> PassOrder | None:
    """The Python twin of `list_schedule`."""
    assert problem.chunks == 1
    rows = [RowCosts(*(array[row].tolist() for array in cost_arrays(problem))) for row in range(problem.micro_batches)]
    device = Device(
        problem.model_state_bytes.tolist(),
        problem.memory_limit_bytes,
        problem.forward_only,
        problem.peak_covers_backward,
    )
    run = run_list_schedule(rows, device, policy, bound=NEVER)
    return None if run is None else tuple(map(passes_of, run[1]))


class RowCosts(NamedTuple):
    """One micro-batch on every rank; as in `PipelineProblem`."""

    forward_ns: list[int]
    backward_ns: list[int]
    stored_bytes: list[int]
    peak_bytes: list[int]
    forward_transfer_ns: list[int]
    backward_transfer_ns: list[int]


class Device(NamedTuple):
    """What every rank has besides the micro-batches."""

    model_state_bytes: list[int]
    memory_limit_bytes: int
    forward_only: bool
    peak_covers_backward: bool = False


NEVER = 2**61
"""Above every time."""


def run_list_schedule(
    rows: Sequence[RowCosts], device: Device, policy: Policy, *, bound: int
) -> tuple[int, list[list[int]]] | None:
    """(makespan, 1 per forward and 0 per backward of each rank), or None.

    None where `list_schedule` has none, and where the makespan reaches `bound`.
    """
    ranks = [_Rank(held) for held in device.model_state_bytes]
    fill = drain = 0
    for rank, at in enumerate(ranks):
        at.work_left = sum(r.forward_ns[rank] + (0 if device.forward_only else r.backward_ns[rank]) for r in rows)
        at.drain = drain
        if any(at.held + row.peak_bytes[rank] > device.memory_limit_bytes for row in rows):
            return None
        if device.peak_covers_backward:
            at.above = max((row.peak_bytes[rank] - row.stored_bytes[rank] for row in rows), default=0)
        if fill + at.work_left + drain >= bound:
            return None
        if rows:
            fill += rows[0].forward_ns[rank] + rows[0].forward_transfer_ns[rank]
        if rows and not device.forward_only and rank + 1 < len(ranks):
            drain += rows[-1].backward_ns[rank] + rows[-1].backward_transfer_ns[rank + 1]
    run = _Run(rows, device, policy, ranks)
    run.choose(0)
    makespan = 0
    for _ in range(len(rows) * len(ranks) * (1 if device.forward_only else 2)):
        rank = min(range(len(ranks)), key=lambda rank: ranks[rank].start)
        at = ranks[rank]
        if at.start >= NEVER:
            return None
        run.step(rank)
        if at.free + at.work_left + at.drain >= bound:
            return None
        makespan = max(makespan, at.free)
        run.choose(rank)
    return makespan, [at.taken for at in ranks]


class _Rank:
    """One rank's progress: passes that have run, and the one to run next."""

    def __init__(self, held: int) -> None:
        self.taken: list[int] = []
        self.forwards = self.backwards = self.free = self.work_left = self.drain = 0
        self.held = held
        self.above = 0  # room that every backward finds
        self.start = NEVER
        self.next_is_forward = True
        self.input_ready: list[int] = []
        self.gradient_ready: list[int] = []


class _Run:
    """List scheduling under way."""

    def __init__(self, rows: Sequence[RowCosts], device: Device, policy: Policy, ranks: list[_Rank]) -> None:
        self.rows, self.device, self.policy, self.ranks = rows, device, policy, ranks
        ranks[0].input_ready = [0] * len(rows)

    def choose(self, rank: int) -> None:
        """Set what a rank runs next, as far as it can know."""
        at = self.ranks[rank]
        row = at.forwards
        admitted = row < len(self.rows) and (
            self.device.forward_only
            or (
                row - at.backwards < self.policy.depths[rank]
                and at.held + self.needed(rank, row) <= self.device.memory_limit_bytes
            )
        )
        forward = backward = NEVER
        if admitted and row < len(at.input_ready):
            forward = max(at.free, at.input_ready[row])
        waits_for_forward = admitted and self.policy.rule is Rule.STRICT
        if not waits_for_forward and at.backwards < len(at.gradient_ready):
            backward = max(at.free, at.gradient_ready[at.backwards])
        first = self.policy.rule is Rule.FORWARD_FIRST
        at.next_is_forward = forward < backward or (forward == backward and first)
        at.start = min(forward, backward)

    def needed(self, rank: int, row: int) -> int:
        """What the next forward adds: its peak, and room for any backward beside it, if one may be next."""
        at, costs = self.ranks[rank], self.rows[row]
        if at.forwards == at.backwards:
            return costs.peak_bytes[rank]
        return max(costs.peak_bytes[rank], costs.stored_bytes[rank] + at.above)

    def step(self, rank: int) -> None:
        """Run a rank's next pass, and let the neighbour whom it feeds choose again."""
        at, last = self.ranks[rank], len(self.ranks) - 1
        at.taken.append(int(at.next_is_forward))
        if at.next_is_forward:
            row = self.rows[at.forwards]
            at.forwards += 1
            at.free = at.start + row.forward_ns[rank]
            at.work_left -= row.forward_ns[rank]
            if not self.device.forward_only:
                at.held += row.stored_bytes[rank]
            if rank < last:
                self.ranks[rank + 1].input_ready.append(at.free + row.forward_transfer_ns[rank])
                self.choose(rank + 1)
            elif not self.device.forward_only:
                at.gradient_ready.append(at.free)
        else:
            row = self.rows[at.backwards]
            at.backwards += 1
            at.free = at.start + row.backward_ns[rank]
            at.work_left -= row.backward_ns[rank]
            at.held -= row.stored_bytes[rank]
            if rank > 0:
                self.ranks[rank - 1].gradient_ready.append(at.free + row.backward_transfer_ns[rank])
                self.choose(rank - 1)


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
