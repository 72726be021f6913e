"""Recipes of quantised training that keep no history, and the name of the one that does."""

import enum
from types import SimpleNamespace
from typing import Any


class Recipe:
    """What a product's operands have to be: positions in whole numbers of `multiple`."""

    multiple = 16

    def __init__(self, *, fp8_format: Any, fp8_dpa: bool = False) -> None:
        assert not fp8_dpa, "attention in eight bits is not rehearsed"


class Float8CurrentScaling(Recipe):
    """One scale for a tensor."""


class Float8BlockScaling(Recipe):
    """A scale for each block."""

    multiple = 128


class MXFP8BlockScaling(Recipe):
    """A scale for each small block."""

    multiple = 32


class DelayedScaling:
    """A base class of Megatron's."""


recipe = SimpleNamespace(
    Format=enum.Enum("Format", "E4M3 HYBRID"),
    DelayedScaling=DelayedScaling,
    Float8CurrentScaling=Float8CurrentScaling,
    Float8BlockScaling=Float8BlockScaling,
    MXFP8BlockScaling=MXFP8BlockScaling,
)
