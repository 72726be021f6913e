"""Entry scripts and commands on rehearsed GPUs, with and without Transformer Engine: nothing of Megatron is replaced.

The rows that a session selects run one after another in two processes, one for each: importing Megatron takes longer
than a run. `docs/gpu-notes.md` says what a rehearsal proves.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import ROOT
from tests.helpers.layouts.compare import assert_close, gradients_of
from tests.helpers.layouts.layout import named, reference
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import build, jobs

pytestmark = pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++")

LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
"""As the run files say."""
ENGINE = "--transformer-impl transformer_engine"
FILE = "--dynapipe-unset transformer-impl no-persist-layer-norm no-masked-softmax-fusion no-bias-dropout-fusion"
"""What a run file says of local layers, taken back."""


@dataclass(frozen=True)
class Row:
    """A run: of an entry script of a family, of `megatron-dynapipe`, or of a layout of `tests.helpers.layouts`."""

    what: str
    flags: str
    ranks: int = 2
    engine: bool = False

    @property
    def id(self) -> str:
        return f"{self.what}, {self.ranks} ranks, {'with' if self.engine else 'no'} engine: {self.flags}"


def rows(*table: tuple[str, int, str]) -> Iterator[Any]:
    """Parameters: of each (family, ranks, flags) a run without Transformer Engine and one with its layers.

    A family that ends with * runs every day without, one that ends with + with, the others are slow.
    """
    for family, ranks, flags in table:
        for engine, daily in ((False, "*"), (True, "+")):
            row = Row(family.rstrip("*+"), flags, ranks, engine)
            yield pytest.param(row, id=row.id, marks=() if daily in family else pytest.mark.slow)
