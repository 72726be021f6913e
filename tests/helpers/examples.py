"""How many examples Hypothesis tries."""

from hypothesis import settings

EVERY_DAY = 200
AT_NIGHT = 1000
"""Of a test that says nothing else."""


def examples(every_day: int) -> int:
    """So many for a test whose examples take long, or are quick; at night in the same proportion more."""
    now: int = settings.default.max_examples
    return every_day * now // EVERY_DAY
