"""One line where iterations keep taking another time than their plans predict."""

import pytest

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.supply.predictions import PredictionWatch


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([130] * 19, None),
        ([130] * 30, "1.30 times as long"),
        ([75] * 20, "0.75 times as long"),
        ([130] * 10 + [75] * 10, "1.02 times as long"),
        ([120] * 40, None),
        ([130] * 19 + [110] + [130] * 19, None),
    ],
)
def test_twenty_in_a_row_are_said_once_with_the_command(measured: list[int], said: str | None) -> None:
    watch = PredictionWatch()
    lines = [line for time in measured if (line := watch.add(100, time, ModelFamily.T5)) is not None]
    assert len(lines) == (said is not None)
    assert not lines or (said in lines[0] and "`megatron-dynapipe profile --model t5 --output" in lines[0])


def test_what_was_not_predicted_says_nothing() -> None:
    watch = PredictionWatch()
    assert not any(watch.add(0, 100, ModelFamily.GPT) for _ in range(40))
