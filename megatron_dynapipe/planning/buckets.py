"""Fewer distinct shapes of micro-batches: lengths and row totals in coarser steps, sizes from a grid.

    lengths        31 → 64, 70 → 128                  with a length multiple of 64
    packed rows    of 1000 positions → 1024           with a row multiple of 256
    sizes          1 2 3 4 6 8 12 16 24 32 …          with 2 sizes to an octave; others are not made

Each shape has kernels to be picked, plans or compilations of its own, and captured graphs need few. Padding costs what
the cost model says of the larger shape, so plans take it into account; a grid of sizes pads nothing.
"""

import msgspec

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import LENGTH_MULTIPLE

SIZES_PER_OCTAVE = (0, 1, 2, 4, 8)
LARGEST_MULTIPLE = 2**20


class ShapeBuckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shapes of micro-batches may be.

    Attributes:
        length_multiple: that inputs and targets of padded micro-batches are rounded up to.
        row_multiple: likewise the positions of packed rows.
        sizes_per_octave: sizes of padded micro-batches from one to its double; 0 allows any.
    """

    length_multiple: int = LENGTH_MULTIPLE
    row_multiple: int = LENGTH_MULTIPLE
    sizes_per_octave: int = 0

    def __post_init__(self) -> None:
        for name in ("length_multiple", "row_multiple"):
            value = getattr(self, name)
            if not 0 < value <= LARGEST_MULTIPLE or value % LENGTH_MULTIPLE:
                shown = name.replace("_", " ")
                raise ConfigError(
                    f"expected a {shown} that {LENGTH_MULTIPLE} divides, up to {LARGEST_MULTIPLE}, got {value}"
                )
        if self.sizes_per_octave not in SIZES_PER_OCTAVE:
            allowed = ", ".join(map(str, SIZES_PER_OCTAVE))
            raise ConfigError(f"expected sizes per octave of {allowed}, got {self.sizes_per_octave}")

    def allows(self, size: int) -> bool:
        """Whether a padded micro-batch may have so many samples; `csrc/problem.cpp` has the same rule."""
        step = 1
        while self.sizes_per_octave and size // step >= 2 * self.sizes_per_octave:
            step *= 2
        return size % step == 0


ANY_SHAPE = ShapeBuckets()
