"""When instructions run: predicted by the planner's simulator, measured by the executor, drawn by `report`."""

import msgspec

from megatron_dynapipe.plan.instructions import Instruction


class Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One instruction's time on one stage, in nanoseconds from the start of the iteration."""

    instruction: Instruction
    start_ns: int
    end_ns: int


Timeline = tuple[tuple[Event, ...], ...]
"""Events per pipeline stage, in the order in which they ran."""
