"""Megatron's own timers, filled from an iteration's trace."""

from types import SimpleNamespace

import pytest

from megatron_dynapipe.core import instructions as ins
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.megatron.entry import checkout
from tests.helpers.processes import in_ranks

MS = 1_000_000
ACTIVATION, GRADIENT = ins.Payload.ACTIVATION, ins.Payload.GRADIENT
TRACE = [
    # instruction, milliseconds
    (ins.Load(0), 3),
    (ins.RecvStart(ACTIVATION, 0, 0, 0, ((8, 1, 4),)), 1),
    (ins.RecvWait(ACTIVATION, 0, 0, 0), 20),
    (ins.Forward(0, 0), 30),
    (ins.Free(ins.Buffer.DATA, 0, 0), 500),
    (ins.Forward(1, 0), 12),
    (ins.SendStart(ACTIVATION, 0, 0, 2, ((8, 1, 4),)), 2),
    (ins.SendWait(ACTIVATION, 0, 0, 2), 5),
    (ins.RecvWait(GRADIENT, 0, 0, 2), 40),
    (ins.Backward(0, 0), 60),
    (ins.SendStart(GRADIENT, 0, 0, 0, ((8, 1, 4),)), 6),
]


class FakeTrace:
    def __init__(self) -> None:
        self.reads = 0

    def events(self) -> tuple[Event, ...]:
        self.reads += 1
        return tuple(Event(instruction, 7 * MS, (7 + ms) * MS) for instruction, ms in TRACE)


@pytest.mark.parametrize("level", [0, 1, 2])
@in_ranks(1)
def test_times_add_up_under_the_names_of_megatrons_schedules(level: int) -> None:
    """Below their log level nothing waits for the device."""
    from megatron.core.timers import Timers

    from megatron_dynapipe.megatron.hooks.timers import add_times, without_timers

    timers, trace = Timers(level, "minmax"), FakeTrace()
    config = SimpleNamespace(timers=timers)
    with without_timers(config):
        assert config.timers is None
        add_times(config.timers, trace, 0.5)
    assert config.timers is timers
    for _ in range(2):
        add_times(timers, trace, 0.1)
    expected = {
        "batch-generator": 2 * (100 + 3),
        "forward-compute": 2 * 42,
        "backward-compute": 2 * 60,
        "forward-recv": 2 * 21,
        "forward-send": 2 * 7,
        "backward-recv": 2 * 40,
        "backward-send": 2 * 6,
    }
    times = {name: round(timer.elapsed() * 1e3, 3) for name, timer in timers._timers.items()}
    assert (times, trace.reads) == ((expected, 2) if level == 2 else ({}, 0))


def test_a_patched_checkout_refuses_timers_between_passes_of_several_stages_on_a_gpu():
    def check(level: int, stages: int, *, on_cpu: bool = False) -> None:
        args = SimpleNamespace(timing_log_level=level, pipeline_model_parallel_size=stages)
        checkout._check_timers(args, on_cpu=on_cpu)

    check(1, 4), check(2, 1), check(2, 4, on_cpu=True)
    with pytest.raises(ConfigError, match="--timing-log-level 2 would stop all stages") as told:
        check(2, 4)
    assert "--timing-log-level 1" in told.value.hint
