"""How far apart checkpoints against losses without notice are: as near as their share of the time allows."""

import math
import statistics
from collections import deque

SAVE_EVERY = 50
"""Iterations between two checkpoints at the least, and until the first has been timed."""
SHARE = 0.02
"""Of a run's time, that saving may take."""
_ROUND = 10
"""Intervals are multiples of this, so that a log of them can be read."""
_WORTH_CHANGING = 1.25
_SAVES = 5
"""The latest ones count: the first also loads what it writes with."""


class SavePace:
    """The interval between checkpoints, from what iterations and saves take.

    Attributes:
        every: iterations from one save to the next.
    """

    def __init__(self) -> None:
        self.every = SAVE_EVERY
        self._iterations = deque[float](maxlen=SAVE_EVERY)
        self._saves = deque[float](maxlen=_SAVES)

    @property
    def iteration_s(self) -> float:
        """Median time of the last iterations, without saving; 0 before the first."""
        return statistics.median(self._iterations) if self._iterations else 0.0

    @property
    def save_s(self) -> float:
        """Median time of the last saves; 0 before the first."""
        return statistics.median_low(self._saves) if self._saves else 0.0

    def trained(self, seconds: float) -> None:
        """Take note of an iteration that nothing was saved in."""
        self._iterations.append(seconds)

    def saved(self, seconds: float) -> bool:
        """Take note of a save; whether `every` is another from now on. Small changes are left out."""
        self._saves.append(seconds)
        if not self.iteration_s:
            return False
        # saves / (iterations + saves) ≤ SHARE
        enough = self.save_s * (1 / SHARE - 1) / self.iteration_s
        every = max(SAVE_EVERY, math.ceil(enough / _ROUND) * _ROUND)
        if every / _WORTH_CHANGING < self.every < every * _WORTH_CHANGING:
            return False
        self.every = every
        return True

    def __str__(self) -> str:
        share = self.save_s / (self.every * self.iteration_s + self.save_s)
        return (
            f"an emergency checkpoint takes {self.save_s:.2f} s, an iteration {self.iteration_s:.2f} s:"
            f" one is saved every {self.every} iterations from now on ({share:.1%} of the time)"
        )
