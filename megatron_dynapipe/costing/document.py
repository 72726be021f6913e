"""What all files of costs have in common, for a transformer's layers and for any model's segments."""

import re
from typing import Annotated

import msgspec

FORMAT = "dynapipe-cost-model/1"
UNITS = {
    "time": "ms for one layer (postprocess: once per model), one micro-batch, one tensor-parallel rank",
    "memory": "MB = 1e6 bytes",
    "lengths": "positions",
    "size": "samples",
}

MOST = 2**31 - 1
"""The most of sizes, lengths, parallel sizes, megabytes of parameters, microseconds: more overflows sums in 64 bits."""

Size = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Table = dict[str, list[tuple[Size, float]]]


def is_cost_file(head: bytes) -> bool:
    """Whether bytes begin as a cost model file does, of whatever version."""
    return re.match(rb'\s*\{\s*"format"\s*:\s*"dynapipe-cost-model/', head) is not None
