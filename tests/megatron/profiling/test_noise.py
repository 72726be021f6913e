"""How quiet a machine was is told by repeats' spread and by the share of a processor that passes had."""

import pytest

from megatron_dynapipe.megatron.profiling.measure import Noise


def test_quartiles_of_repeats_are_relative_to_their_median() -> None:
    noise = Noise()
    noise.add([(60, 40)])
    assert noise.described() == {}, "one repeat says nothing"
    noise.add([(60, 40)] * 8)
    noise.add([(time, 40) for time in (30, 40, 50, 60, 70, 80, 90)])
    noise.add([(60, 40)] * 3)
    assert noise.described() == {"repeats_spread": 0.0}
    noise.spreads = noise.spreads[1:2]
    assert noise.described() == {"repeats_spread": pytest.approx(0.4)}


def test_the_share_is_of_the_time_in_which_passes_ran() -> None:
    assert Noise(processor_s=1.0, wall_s=4.0).described() == {"processor_share": 0.25}
