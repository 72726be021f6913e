"""The factor of an fp16 loss, the same on every rank because every rank hears of every overflow."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Doubled after a while without an overflow, halved after each.

    Attributes:
        value: now.
        growth_interval: steps without an overflow after which it is doubled; 0 keeps it as it is.
        least: it is not halved below this.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    least: float = 1.0
    good_steps: int = 0

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if not self.growth_interval:
            return
        if overflow:
            self.value = max(self.value / 2, self.least)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= 2
            self.good_steps = 0
