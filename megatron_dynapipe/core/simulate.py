"""The cost of a pass order: an event simulation in time and memory.

The native core simulates (`csrc/schedule/simulate.cpp`, `csrc/schedule/transfers.cpp`);
`tests/core/simulate_oracle.py` states the same rules in Python.

    stage 0  F0 F1 ·· B0 F2 B1 …      a pass starts when its stage is free and its input has arrived;
    stage 1     F0 B0 F1 B1 …         a message arrives its transfer time after the pass that made it ends
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dynapipe.core.errors import PlanningError, StallError
from megatron_dynapipe.core.instructions import format_instruction
from megatron_dynapipe.core.native import PassOrder, core, to_codes
from megatron_dynapipe.core.network import TransferRules
from megatron_dynapipe.core.plan import Event, Timeline
from megatron_dynapipe.core.problem import IntArray, ScheduleProblem, native_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One replica's iteration as predicted. Tuples are per pipeline stage."""

    timeline: Timeline
    """One event per pass."""
    makespan_ns: int
    busy_ns: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    """High-water mark, model state included."""


def simulate(problem: ScheduleProblem, order: PassOrder) -> Simulation:
    """Run `order` on the problem's costs, under its rules of transfers.

    If they are not the default, a message is under way once its send has been started and its receive posted, and
    arrives its transfer time later. A receive is posted `receive_ahead` passes before the one that needs it, after the
    channel's previous message has been received. With `ordered_starts` a stage that starts a send stands still until
    the channel's previous message has arrived.

    Args:
        problem: costs of the micro-batches.
        order: passes per stage.

    Raises:
        PlanningError: the order stalls: a pass waits for one that can only run after it.
        StallError: it stalls by the problem's rules alone.
    """
    starts, ends, peaks, makespan, stalled_at = _run(problem, order)
    if stalled_at:
        plain = replace(problem, transfers=TransferRules())
        if not problem.transfers.are_plain and not (stalled_at := _run(plain, order)[-1]):
            raise StallError(
                "the pass order stalls where starts of transfers wait: stages wait for one another to receive",
                hint="let stages run fewer forwards ahead, or plan without ordered_starts",
            )
        stuck = [
            f"stage {stage} at {format_instruction(passes[at])}"
            for stage, (passes, at) in enumerate(zip(order, stalled_at, strict=True))
            if at < len(passes)
        ]
        raise PlanningError(f"the pass order stalls: {', '.join(stuck)}")
    timeline = tuple(
        tuple(map(Event, passes, start, end))  # rows of stages with fewer passes are longer than these
        for passes, start, end in zip(order, starts.tolist(), ends.tolist(), strict=True)
    )
    return Simulation(
        timeline=timeline,
        makespan_ns=makespan,
        busy_ns=tuple((ends - starts).sum(axis=1).tolist()),
        peak_bytes=tuple(peaks),
    )


def simulate_all(problem: ScheduleProblem, orders: Sequence[PassOrder]) -> list[tuple[Simulation, PassOrder]]:
    """`simulate` of several orders, without those that stall by the problem's rules; raises StallError if all do."""
    runs = []
    stalled: StallError | None = None
    for order in orders:
        try:
            runs.append((simulate(problem, order), order))
        except StallError as error:
            stalled = error
    if stalled is not None and not runs:
        raise stalled
    return runs


def _run(problem: ScheduleProblem, order: PassOrder) -> tuple[IntArray, IntArray, list[int], int, list[int]]:
    """Starts and ends `[stages, passes]`, peak bytes, makespan; of an order that stalls, the passes each stage ran."""
    return core.simulate(
        problem.cost_arrays,
        problem.chunks,
        problem.model_state_bytes,
        problem.forward_only,
        to_codes(order, problem.chunks),
        problem.peak_covers_backward,
        **native_rules(problem.transfers),
    )
