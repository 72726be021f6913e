"""When instructions run: predicted by the planner's simulator, measured by the executor, drawn by `report`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from megatron_dynapipe.plan.instructions import EFFECTS, Instruction, Pass, Work

FORWARD = "forward"
BACKWARD = "backward"
TRANSFER = "transfer"
OTHER = "other"
"""Kinds of instructions, for where time went."""
_KINDS = {
    Work.FORWARD: FORWARD,
    Work.BACKWARD: BACKWARD,
    Work.WEIGHTS: BACKWARD,
    Work.TRANSFER: TRANSFER,
    Work.WAIT: TRANSFER,
}
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
    passes = (event for events in timeline for event in events if isinstance(event.instruction, Pass))
    return 1 - sum(event.end_ns - event.start_ns for event in passes) / whole if whole else 0.0


def kind_of(instruction: Instruction) -> str:
    """The kind of work that an instruction's time counts to."""
    return _KINDS.get(EFFECTS[type(instruction)].work, OTHER)


def time_by_kind(events: Sequence[Event]) -> Mapping[str, int]:
    """Nanoseconds of a stage's instructions, by kind; 0 for a kind that does not occur."""
    spent: dict[str, int] = defaultdict(int)
    for event in events:
        spent[kind_of(event.instruction)] += event.end_ns - event.start_ns
    return spent
