"""The arguments that say which global batches are planned, and the batches that they name."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dynapipe.cli.batches import NamedBatch, dataset_batches, read_batches
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.megatron.flags.planning_flags import positive
from megatron_dynapipe.tools.rivals.methods import Longest

BATCHES = 8
SAMPLES = 64
SEED = 1234
"""Batches taken of a dataset, samples of each, and the sampler's seed, which is Megatron's own default."""


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where lengths come from."""
    source = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument
    source.add_argument("--batches", type=Path, metavar="FILE", help="lengths of global batches (docs/comparing.md)")
    source.add_argument("--data", type=Path, metavar="DATASET", help="a dataset folder: the sampler's own batches")
    add("--global-batch-size", type=positive, metavar="N", help=f"samples of a batch of --data (default: {SAMPLES})")
    add("--tokens-per-global-batch", type=positive, metavar="N", help="most tokens of a batch of --data")
    add("--data-seed", type=int, metavar="N", help=f"of the sampler of --data: a run's --seed (default: {SEED})")
    of_run = (
        "truncate longer inputs and targets (default: as the run file of --model-config says, if --data gives them)"
    )
    add("--max-seq-len", type=positive, metavar="N", help=of_run)
    add("--max-target-len", type=positive, metavar="N", help="truncate longer targets (default: as inputs)")
    add(
        "--loss", choices=("targets", "everything"), help="of --data: which tokens count (default: as the dataset says)"
    )
    add("--limit", type=positive, metavar="K", help=f"only the first K batches (default: all; of --data {BATCHES})")


def given_batches(args: argparse.Namespace) -> list[NamedBatch]:
    """The batches that the arguments name, read once: all of a file's, of a dataset's as many as --limit says.

    Raises:
        ConfigError: an argument that does not go with another.
        DataError: as `read_batches` and `dataset_batches`.
    """
    if not hasattr(args, "batches_read"):
        args.batches_read = _read(args)
    batches: list[NamedBatch] = args.batches_read
    return batches


def _read(args: argparse.Namespace) -> list[NamedBatch]:
    if args.data is not None:
        max_seq_len, max_target_len = _maximum_lengths(args)
        return dataset_batches(
            args.data,
            args.model,
            batches=args.limit or BATCHES,
            samples=args.global_batch_size or SAMPLES,
            tokens=args.tokens_per_global_batch,
            seed=SEED if args.data_seed is None else args.data_seed,
            max_seq_len=max_seq_len,
            max_target_len=max_target_len,
            loss_on=args.loss,
        )
    for name in ("global_batch_size", "tokens_per_global_batch", "data_seed", "loss"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with --data, and --batches was given",
                hint="the batches of a file are planned as they stand there",
            )
    return read_batches(
        args.batches, args.model, max_seq_len=args.max_seq_len, max_target_len=args.max_target_len or args.max_seq_len
    )


def labelled(args: argparse.Namespace, batches: Sequence[NamedBatch]) -> list[NamedBatch]:
    """The same batches of --data with the positions that count where targets alone do."""
    other = argparse.Namespace(**vars(args) | {"loss": "targets", "limit": len(batches)})
    return _read(other)


def _maximum_lengths(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """The lengths to which a dataset's inputs and targets are truncated: as the flags say, else the run file."""
    flags = args.max_seq_len, args.max_target_len or args.max_seq_len
    of_run: tuple[int | None, int | None] = getattr(args, "run_lengths", (None, None))
    lengths = flags[0] or of_run[0], flags[1] or of_run[1]
    if lengths != flags:
        said = " and ".join(str(length) for length in lengths if length is not None)
        print(f"longer samples are truncated to {said} tokens, as {args.model_config} has it", file=sys.stderr)
    return lengths


def chosen_batches(args: argparse.Namespace) -> list[NamedBatch]:
    """The batches to plan; raises as `given_batches`."""
    return given_batches(args)[: args.limit]


def longest_rows(args: argparse.Namespace, batch: NamedBatch, batches: Sequence[NamedBatch]) -> Longest:
    """The lengths of padded and packed rows: the batch's maximum length, else the longest sample of all batches.

    Raises:
        DataError: the file gives a maximum length that a sample exceeds.
    """
    if batch.max_seq_len is None:
        inputs = args.max_seq_len or max(max(other.input, default=1) for other in batches)
        targets = args.max_target_len or args.max_seq_len or max(max(other.target or [0]) for other in batches)
    else:
        inputs = batch.max_seq_len
        targets = batch.max_target_len or batch.max_seq_len
        for name, most, lengths in (("max_seq_len", inputs, batch.input), ("max_target_len", targets, batch.target)):
            if (longest := max(lengths or [0])) > most:
                raise DataError(
                    f"batch {batch.id}: expected samples of up to {name} = {most} tokens, got one of {longest}",
                    hint="correct the batches file, or truncate with --max-seq-len and --max-target-len",
                )
    return Longest.of_tokens(args.model, inputs, targets if args.model.is_encoder_decoder else 0)
