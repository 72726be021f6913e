"""How far predicted times are from measured ones while training, and what to do where that stays so."""

from statistics import median

from megatron_dynapipe.core.units import ModelFamily

_MOST_OFF = 0.2
"""A share of the predicted time, between it and the measured one."""
_ITERATIONS = 20


class PredictionWatch:
    """Says once when so many iterations in a row took another time than their plans predicted."""

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._has_said = False

    def add(self, predicted_ns: int, measured_ns: int, family: ModelFamily) -> str | None:
        """Take an iteration's times; the line to print, if it is the one that makes the row full."""
        if self._has_said or predicted_ns <= 0:
            return None
        ratio = measured_ns / predicted_ns
        self._ratios = [*self._ratios, ratio] if abs(ratio - 1) > _MOST_OFF else []
        if len(self._ratios) < _ITERATIONS:
            return None
        self._has_said = True
        return (
            f"the last {_ITERATIONS} iterations took {median(self._ratios):.2f} times as long as predicted"
            " (median): the costs that plans are made with do not fit this machine\nhint: measure them again with"
            f" `megatron-dynapipe profile --model {family} --output costs.json -- FLAGS`, FLAGS being this run's, and"
            " go on with --dynapipe-cost-model costs.json"
        )
