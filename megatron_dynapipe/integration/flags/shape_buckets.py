"""The flags of what shapes micro-batches may have, and the planner's setting with them."""

import argparse

import msgspec

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.buckets import ANY_SHAPE, SIZES_PER_OCTAVE, ShapeBuckets
from megatron_dynapipe.units import LENGTH_MULTIPLE

LENGTHS, ROWS, SIZES = (
    "--dynapipe-round-seqlen-multiple",
    "--dynapipe-round-row-multiple",
    "--dynapipe-sizes-per-octave",
)


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        LENGTHS,
        type=int,
        default=LENGTH_MULTIPLE,
        metavar="N",
        help=f"lengths of padded micro-batches are rounded up to a multiple of N, itself one of {LENGTH_MULTIPLE}, so"
        f" that fewer shapes occur (default {LENGTH_MULTIPLE})",
    )
    add(ROWS, type=int, default=LENGTH_MULTIPLE, metavar="N", help="the same for positions of packed rows")
    add(
        SIZES,
        type=int,
        default=0,
        choices=SIZES_PER_OCTAVE,
        help="sizes of padded micro-batches from one to its double, so that fewer shapes occur (default 0: any)",
    )


def shape_buckets(args: argparse.Namespace) -> ShapeBuckets | msgspec.UnsetType:
    """What the flags ask for; unset where they ask for nothing.

    Raises:
        ConfigError: a multiple that cannot be, or that does not divide a longest length.
    """
    lengths, rows = args.dynapipe_round_seqlen_multiple, args.dynapipe_round_row_multiple
    for flag, value in ((LENGTHS, lengths), (ROWS, rows)):
        if value < LENGTH_MULTIPLE or value % LENGTH_MULTIPLE:
            raise ConfigError(f"expected {flag} as a multiple of {LENGTH_MULTIPLE}, got {value}")
    for flag in ("--seq-length", "--decoder-seq-length"):
        longest = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if longest and longest % lengths:
            raise ConfigError(
                f"expected {flag} to be a multiple of {LENGTHS} {lengths}, got {longest}",
                hint=f"for example {flag} {longest // lengths * lengths + lengths}",
            )
    made = ShapeBuckets(length_multiple=lengths, row_multiple=rows, sizes_per_octave=args.dynapipe_sizes_per_octave)
    return msgspec.UNSET if made == ANY_SHAPE else made
