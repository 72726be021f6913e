"""How far apart checkpoints against losses without notice are: as near as their share of the time allows."""

import statistics
from collections import deque

SAVE_EVERY = 50
"""Iterations between two checkpoints at the least, and until one has been timed."""
SHARE = 0.02
"""Of a run's time, that saving may take."""
_CLEARLY = 0.75
"""Of the time that saving may take, what it would take at half the interval for it to be halved."""
_SAVES = 5
"""The latest ones count."""


class SavePace:
    """The interval between checkpoints, from what iterations and saves take.

    Attributes:
        every: iterations from one save to the next.
    """

    def __init__(self) -> None:
        self.every = SAVE_EVERY
        self._iterations = deque[float](maxlen=SAVE_EVERY)
        self._saves = deque[float](maxlen=_SAVES)
        self._is_first = True

    @property
    def iteration_s(self) -> float:
        """Median time of the last iterations, without saving; 0 before the first."""
        return statistics.median(self._iterations) if self._iterations else 0.0

    @property
    def save_s(self) -> float:
        """Median time of the last saves; 0 before the first."""
        return statistics.median_high(self._saves) if self._saves else 0.0

    def trained(self, seconds: float) -> None:
        """Take note of an iteration that nothing was saved in."""
        self._iterations.append(seconds)

    def saved(self, seconds: float) -> bool:
        """Take note of a save; whether `every` is another from now on.

        It doubles and is halved: saves are after its multiples, and none comes right after another when it changes. A
        run's first save does not count: it also loads and starts what it writes with, often for ten times its time.
        """
        is_first, self._is_first = self._is_first, False
        if is_first or not self.iteration_s:
            return False
        self._saves.append(seconds)
        before = self.every
        enough = self.save_s * (1 / SHARE - 1) / self.iteration_s  # saves / (iterations + saves) ≤ SHARE
        while self.every < enough:
            self.every *= 2
        while self.every > SAVE_EVERY and enough < _CLEARLY * self.every / 2:
            self.every //= 2
        return self.every != before

    def __str__(self) -> str:
        share = self.save_s / (self.every * self.iteration_s + self.save_s)
        return (
            f"an emergency checkpoint takes {self.save_s:.2f} s, an iteration {self.iteration_s:.2f} s:"
            f" one is saved every {self.every} iterations from now on ({share:.1%} of the time)"
        )
