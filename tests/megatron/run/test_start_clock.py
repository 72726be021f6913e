"""Where the time of a start went: phases in order, once."""

import time

from megatron_dynapipe.megatron.run.start_clock import StartClock


def test_the_clock_begins_with_the_process_and_adds_up_what_a_phase_takes():
    clock = StartClock()
    clock.ends("imports")
    time.sleep(0.06)
    clock.ends("model")
    clock.ends("nothing")
    time.sleep(0.06)
    clock.ends("model")
    said = clock.finish("first iteration")
    assert said is not None
    whole, parts = said.removesuffix(")").split(" s (")
    spent = {name: float(seconds) for name, seconds in (part.rsplit(" ", 1) for part in parts.split(", "))}
    assert list(spent) == ["imports", "model"]  # phases that took no time are left out
    assert spent["imports"] > 0.1  # this process has imported pytest at least
    assert spent["model"] >= 0.1
    assert abs(float(whole) - sum(spent.values())) < 0.2


def test_a_start_is_told_once():
    clock = StartClock()
    assert clock.finish("first iteration") is not None
    clock.ends("training")
    assert clock.finish("first iteration") is None
