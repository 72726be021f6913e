"""When instructions run: predicted by the planner's simulator, measured by the executor, drawn by `report`."""

import msgspec

from megatron_dynapipe.plan.instructions import Instruction, Pass

MUCH_IDLE = 0.25
"""Idle share from which on commands and run summaries add a hint at what lowers it."""


class Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One instruction's time on one stage, in nanoseconds from the start of the iteration."""

    instruction: Instruction
    start_ns: int
    end_ns: int


Timeline = tuple[tuple[Event, ...], ...]
"""Events per pipeline stage, in the order in which they ran."""


def idle_share(timeline: Timeline, span_ns: int) -> float:
    """Share of all stages' time, `span_ns` each, in which no pass ran; 0 without stages or time."""
    whole = span_ns * len(timeline)
    passes = (each for events in timeline for each in events if isinstance(each.instruction, Pass))
    return 1 - sum(each.end_ns - each.start_ns for each in passes) / whole if whole else 0.0
