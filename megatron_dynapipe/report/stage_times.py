"""Where a stage's time went: compute, transfers and what waits in them, plans, and what lies between two iterations."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from megatron_dynapipe.plan.instructions import (
    Backward,
    Forward,
    Instruction,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
)
from megatron_dynapipe.plan.timeline import Event, Timeline

FORWARD, BACKWARD, TRANSFER, OTHER = "forward", "backward", "transfer", "other"


def kind_of(instruction: Instruction) -> str:
    """What an instruction's time counts to."""
    match instruction:
        case Forward():
            return FORWARD
        case Backward():
            return BACKWARD
        case SendStart() | SendWait() | RecvStart() | RecvWait():
            return TRANSFER
        case _:
            return OTHER


def time_by_kind(events: Sequence[Event]) -> Mapping[str, int]:
    """Nanoseconds of a stage's instructions, by kind; 0 for a kind that does not occur."""
    spent: dict[str, int] = defaultdict(int)
    for event in events:
        spent[kind_of(event.instruction)] += event.end_ns - event.start_ns
    return spent


def bubble_shares(timeline: Timeline) -> list[float]:
    """Per stage, how much of its transfer time it waited for a peer that had not begun to send: the bubble.

    What is left is the transfer itself. Times of all stages are on one clock. A message is found by its micro-batch:
    those of one micro-batch between two stages, of several chunks, come in the order in which they were sent.
    """
    sent: dict[tuple[int, int, Payload, int], deque[int]] = defaultdict(deque)
    for stage, events in enumerate(timeline):
        for event in events:
            if isinstance(each := event.instruction, SendStart):
                sent[stage, each.peer, each.payload, each.micro_batch].append(event.start_ns)
    return [_bubble_share(stage, events, sent) for stage, events in enumerate(timeline)]


def _bubble_share(stage: int, events: Sequence[Event], sent: dict[tuple[int, int, Payload, int], deque[int]]) -> float:
    waited = 0
    for event in events:
        if isinstance(each := event.instruction, RecvWait):
            starts = sent[each.peer, stage, each.payload, each.micro_batch]
            if starts:
                waited += max(min(starts.popleft(), event.end_ns) - event.start_ns, 0)
    whole = time_by_kind(events)[TRANSFER]
    return waited / whole if whole else 0.0
