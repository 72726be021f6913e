"""An iteration's times in Megatron's own timers, under the names that its schedules give them.

Megatron's timers wait for the device when they start and when they stop. Between passes that would never end on a GPU:
a receive that was posted early is work of the device until a peer has sent, and the peer waits likewise. So the timers
are given the times of the trace, once the iteration is over.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from megatron.core.timers import Timer, Timers

from megatron_dynapipe.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Load,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
)
from megatron_dynapipe.runtime import Trace

LOG_LEVEL = 2
"""From which `--timing-log-level` on Megatron logs these timers."""
BATCH, FORWARD, BACKWARD = "batch-generator", "forward-compute", "backward-compute"


def timer_name(instruction: Instruction) -> str | None:
    """The timer of Megatron's that an instruction belongs to: `forward-recv` is a stage's wait for activations."""
    match instruction:
        case Load():
            return BATCH
        case Forward():
            return FORWARD
        case Backward() | BackwardInput() | BackwardWeight():
            return BACKWARD
        case RecvStart(payload=payload) | RecvWait(payload=payload):
            return "forward-recv" if payload is Payload.ACTIVATION else "backward-recv"
        case SendStart(payload=payload) | SendWait(payload=payload):
            return "forward-send" if payload is Payload.ACTIVATION else "backward-send"
    return None


def add_times(timers: Timers | None, trace: Trace, waited_seconds: float) -> None:
    """Add an iteration to the timers, if Megatron has them and its log level includes these.

    Args:
        timers: those of the model's configuration; Megatron takes them away while it evaluates.
        trace: of the iteration; at this log level Megatron has waited for the device, so that reading it does not.
        waited_seconds: for the plan; counted to the time that a batch takes.
    """
    if timers is None or not isinstance(timers(FORWARD, log_level=LOG_LEVEL), Timer):
        return
    seconds = defaultdict(float, {BATCH: waited_seconds})
    for event in trace.events():
        name = timer_name(event.instruction)
        if name is not None:
            seconds[name] += (event.end_ns - event.start_ns) / 1e9
    for name, added in seconds.items():
        timer = timers(name, log_level=LOG_LEVEL)
        timer.set_elapsed(timer.elapsed(reset=False) + added)


@contextlib.contextmanager
def without_timers(config: Any) -> Iterator[None]:
    """Megatron's functions for single passes find no timers in the model's configuration, as while it evaluates."""
    timers, config.timers = config.timers, None
    try:
        yield
    finally:
        config.timers = timers
