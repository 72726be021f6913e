"""What measured times have made of costs, and from which iteration on: part of what a plan is a pure function of.

    iterations   0 … 17          18 … 41 (planned before anybody knew)        42 …
    costs        as they are     as they are                                  × correction 1, of what 2 … 17 measured
    keys         …:12:…          …:30:…                                       …:42c1:…

A planner that does not know a correction publishes under other keys, where nobody looks: its plans are late, and made
by the nodes, which all know it.
"""

from collections.abc import Sequence

import msgspec

Percents = tuple[tuple[int, int, int], ...]
"""The form of `PlannerSettings.corrections`."""


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction of costs, for training iterations from one on.

    Attributes:
        number: from 1.
        first_iteration: the first that is planned with it.
        percents: percent of what costs say, not of what the previous correction has made of them.
    """

    number: int
    first_iteration: int
    percents: Percents


def in_force(corrections: Sequence[Correction], iteration: int) -> Correction | None:
    """The latest correction that holds for an iteration."""
    return next((each for each in reversed(corrections) if each.first_iteration <= iteration), None)
