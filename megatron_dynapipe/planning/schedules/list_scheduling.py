"""List scheduling: every rank takes the next pass that can start, within its memory.

Passes keep one sequence on all ranks, forward and backward (that of 1F1B, interleaved where ranks hold several chunks),
so that a rank only ever chooses between *the* next forward and *the* next backward. It takes the one that can start
first; a `Rule` breaks ties. A forward is admitted while fewer than `depth` forwards of the rank wait for their
backward, and its peak fits beside what they keep; where peaks cover the backward, what it keeps must besides leave room
for every backward.

With one chunk, the oldest micro-batch in flight is never held up by younger ones, and each fits alone: list scheduling
ends under every rule but the strict one, which can wait for a forward that never comes. With several, ranks short of
memory can also wait for each other, since a later chunk of the oldest needs room too.

This is the readable statement of the rules and the oracle of the native twins (`csrc/simulate.cpp`, for several chunks
`csrc/interleave.cpp`), which the order search runs thousands of times per plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.plan.instructions import Backward, Forward, Pass
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.problem import PassOrder, PipelineProblem
from megatron_dynapipe.planning.schedules.one_f_one_b import forwards_of_earlier_chunks, sequences
from megatron_dynapipe.planning.simulate import cost_arrays


class Rule(IntEnum):
    """Which pass a rank takes where its next forward and its next backward could both start."""

    BACKWARD_FIRST = 0
    FORWARD_FIRST = 1
    STRICT = 2
    """1F1B: wait for the forward until `depth` are in flight, and for the backward then."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How list scheduling chooses."""

    depths: tuple[int, ...]
    """Per rank, most forwards ahead of its backwards; with several chunks, beyond `forwards_of_earlier_chunks`."""
    rule: Rule


def list_schedule(problem: PipelineProblem, policy: Policy) -> PassOrder | None:
    """The order in which ranks take passes under a policy, in the problem's own predicted times.

    None where a micro-batch does not fit a rank's memory even alone, and where ranks wait for each other for ever.
    """
    if NATIVE is None:
        return list_schedule_in_python(problem, policy)
    makespan, forwards = NATIVE.list_schedule(
        cost_arrays(problem),
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
    return order_of(np.array(forwards).reshape(problem.stages, -1).tolist(), problem.micro_batches, problem.chunks)


def list_schedule_in_python(problem: PipelineProblem, policy: Policy) -> PassOrder | None:
    """The Python twin of `list_schedule`."""
    rows = [RowCosts(*(array[row].tolist() for array in cost_arrays(problem))) for row in range(problem.micro_batches)]
    device = Device(
        problem.model_state_bytes.tolist(),
        problem.memory_limit_bytes,
        problem.forward_only,
        problem.peak_covers_backward,
    )
    run = run_list_schedule(rows, device, policy, bound=NEVER)
    return None if run is None else order_of(run[1], problem.micro_batches, problem.chunks)


class RowCosts(NamedTuple):
    """One micro-batch on every virtual stage; as in `PipelineProblem`."""

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
    if not rows:
        return 0, [at.taken for at in ranks]
    stages, virtual_stages = len(ranks), len(rows[0].forward_ns)
    fill = drain = 0
    for rank, at in enumerate(ranks):
        held = range(rank, virtual_stages, stages)
        both = [(row, stage) for row in rows for stage in held]
        at.work_left = sum(r.forward_ns[v] + (0 if device.forward_only else r.backward_ns[v]) for r, v in both)
        at.drain = drain
        if any(at.held + row.peak_bytes[v] > device.memory_limit_bytes for row, v in both):
            return None
        if device.peak_covers_backward:
            at.above = max(row.peak_bytes[v] - row.stored_bytes[v] for row, v in both)
        if fill + at.work_left + drain >= bound:
            return None
        fill += rows[0].forward_ns[rank] + rows[0].forward_transfer_ns[rank]
        if not device.forward_only and rank + 1 < stages:
            drain += rows[-1].backward_ns[rank] + rows[-1].backward_transfer_ns[rank + 1]
    run = _Run(rows, device, policy, ranks)
    run.choose(0)
    makespan = 0
    for _ in range(len(rows) * virtual_stages * (1 if device.forward_only else 2)):
        rank = min(range(stages), key=lambda rank: ranks[rank].start)
        at = ranks[rank]
        if at.start >= NEVER:
            return None
        fed = run.step(rank)
        if at.free + at.work_left + at.drain >= bound:
            return None
        makespan = max(makespan, at.free)
        run.choose(fed)
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


class _Run:
    """List scheduling under way."""

    def __init__(self, rows: Sequence[RowCosts], device: Device, policy: Policy, ranks: list[_Rank]) -> None:
        self.rows, self.device, self.ranks, self.rule = rows, device, ranks, policy.rule
        self.last = len(rows[0].forward_ns) - 1
        chunks = (self.last + 1) // len(ranks)
        self.forwards, self.backwards = sequences(len(rows), len(ranks), chunks)
        more = forwards_of_earlier_chunks(len(rows), len(ranks), chunks)
        self.depths = [depth + more for depth in policy.depths]
        self.input_ready = {(row, 0): 0 for row in range(len(rows))}
        self.gradient_ready: dict[tuple[int, int], int] = {}
        """(micro-batch, virtual stage) → when it is there."""

    def choose(self, rank: int) -> None:
        """Set what a rank runs next, as far as it can know."""
        at = self.ranks[rank]
        forward = backward = NEVER
        admitted = False
        if at.forwards < len(self.forwards):
            row, v = self.place(rank, self.forwards[at.forwards])
            in_flight = at.forwards - at.backwards
            admitted = self.device.forward_only or (
                in_flight < self.depths[rank] and at.held + self.needed(at, row, v) <= self.device.memory_limit_bytes
            )
            if admitted and (row, v) in self.input_ready:
                forward = max(at.free, self.input_ready[row, v])
        if at.backwards < len(self.backwards) and not (admitted and self.rule is Rule.STRICT):
            place = self.place(rank, self.backwards[at.backwards])
            if place in self.gradient_ready:
                backward = max(at.free, self.gradient_ready[place])
        at.next_is_forward = forward < backward or (forward == backward and self.rule is Rule.FORWARD_FIRST)
        at.start = min(forward, backward)

    def needed(self, at: _Rank, row: int, v: int) -> int:
        """What the next forward adds: its peak, and room for any backward beside it, if one may be next."""
        costs = self.rows[row]
        if at.forwards == at.backwards:
            return costs.peak_bytes[v]
        return max(costs.peak_bytes[v], costs.stored_bytes[v] + at.above)

    def place(self, rank: int, step: Pass) -> tuple[int, int]:
        """(micro-batch, virtual stage) of a rank's pass."""
        return step.micro_batch, step.chunk * len(self.ranks) + rank

    def step(self, rank: int) -> int:
        """Run a rank's next pass; the rank that it feeds, or itself."""
        at = self.ranks[rank]
        at.taken.append(int(at.next_is_forward))
        if at.next_is_forward:
            row, v = self.place(rank, self.forwards[at.forwards])
            costs = self.rows[row]
            at.forwards += 1
            at.free = at.start + costs.forward_ns[v]
            at.work_left -= costs.forward_ns[v]
            if not self.device.forward_only:
                at.held += costs.stored_bytes[v]
            if v < self.last:
                self.input_ready[row, v + 1] = at.free + costs.forward_transfer_ns[v]
                return (rank + 1) % len(self.ranks)
            if not self.device.forward_only:
                self.gradient_ready[row, v] = at.free
            return rank
        row, v = self.place(rank, self.backwards[at.backwards])
        costs = self.rows[row]
        at.backwards += 1
        at.free = at.start + costs.backward_ns[v]
        at.work_left -= costs.backward_ns[v]
        at.held -= costs.stored_bytes[v]
        if v == 0:
            return rank
        self.gradient_ready[row, v - 1] = at.free + costs.backward_transfer_ns[v]
        return (rank - 1) % len(self.ranks)


def order_of(forwards: Sequence[Sequence[int]], micro_batches: int, chunks: int) -> PassOrder:
    """The passes of every rank from 1 per forward and 0 per backward, as the native twin returns them."""
    in_order = sequences(micro_batches, len(forwards), chunks)
    return tuple(_passes(rank, *in_order) for rank in forwards)


def _passes(taken: Sequence[int], forwards: Sequence[Forward], backwards: Sequence[Backward]) -> tuple[Pass, ...]:
    forward, backward = iter(forwards), iter(backwards)
    return tuple(next(forward) if each else next(backward) for each in taken)
