"""What a check of `doctor` has found."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found of one thing.

    Attributes:
        name: the thing.
        status: "fail" if training here cannot work because of it; "note" if it works, but less well.
        found: what is there, with its version.
        hint: what to do about it.
    """

    name: str
    status: Literal["ok", "note", "fail"]
    found: str
    hint: str | None = None
