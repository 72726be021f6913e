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

from megatron_dynapipe.core.instructions import EFFECTS, SENT_BUFFER, Instruction, Payload, Transfer, Work
from megatron_dynapipe.runtime import Trace

LOG_LEVEL = 2
"""From which `--timing-log-level` on Megatron logs these timers."""
BATCH = "batch-generator"
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
_NAMES = {Work.LOAD: BATCH, Work.FORWARD: FORWARD, Work.BACKWARD: BACKWARD, Work.WEIGHTS: BACKWARD}


def timer_name(instruction: Instruction) -> str | None:
    """The timer of Megatron's that an instruction belongs to: `forward-recv` is a stage's wait for activations."""
    effect = EFFECTS[type(instruction)]
    if isinstance(instruction, Transfer):
        way = "forward" if instruction.payload is Payload.ACTIVATION else "backward"
        return f"{way}-send" if effect.carries is SENT_BUFFER else f"{way}-recv"
    return _NAMES.get(effect.work)


def add_times(timers: Timers | None, trace: Trace, waited_seconds: float) -> None:
    """Add an iteration to the timers, if Megatron has them and its log level includes these.

    Args:
        timers: the model's configuration has them; Megatron takes them away while it evaluates.
        trace: the iteration's; at this log level Megatron has waited for the device, so that reading it does not.
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
    timers = config.timers
    config.timers = None
    try:
        yield
    finally:
        config.timers = timers
