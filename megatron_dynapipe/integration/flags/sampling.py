"""Flags of what an iteration holds: samples or tokens, epochs, how batches begin and end, what of a sample counts."""

import argparse
from typing import Any

import msgspec

from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.sampling import LastBatch, LongSamples, RampUp, SamplerSettings, TruncationSide
from megatron_dynapipe.service.settings import SplitSettings
from megatron_dynapipe.service.source import split_sampler


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    """Add them."""
    add = group.add_argument
    add(
        "--dynapipe-long-samples",
        choices=[policy.value for policy in LongSamples],
        default=LongSamples.FAIL.value,
        help="samples longer than the maximum: stop (default), truncate, or leave out",
    )
    add(
        "--dynapipe-allow-other-data",
        action="store_true",
        help="resume a checkpoint on other data than it was trained on",
    )
    add(
        "--tokens-per-global-batch",
        type=int,
        metavar="N",
        help="tokens (input and target) of an iteration at most, in place of --global-batch-size samples",
    )
    add("--train-epochs", type=int, metavar="N", help="train so many epochs of the data, in place of --train-iters")
    add(
        "--dynapipe-last-batch",
        choices=[choice.value for choice in LastBatch],
        default=LastBatch.CONTINUE.value,
        help="an epoch's end that does not fill a batch: the batch goes on into the next epoch (default), is kept "
        "as it is, or is dropped",
    )
    add(
        "--dynapipe-ramp-up",
        type=int,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="let batches grow from START samples to --global-batch-size by INCREMENT, during SAMPLES samples",
    )
    add(
        "--dynapipe-truncate",
        choices=[side.value for side in TruncationSide],
        default=TruncationSide.RIGHT.value,
        help="where samples lose tokens with --dynapipe-long-samples truncate (default right)",
    )
    add(
        "--dynapipe-loss",
        choices=[choice.value for choice in LossOn],
        help="tokens of a GPT's samples that count: of targets, or all (default: as the dataset says, of conversations "
        "the assistant's turns, else all)",
    )


def of_training(args: argparse.Namespace, settings: SamplerSettings) -> SamplerSettings:
    """The sampler's settings with what these flags and the dataset's mixture say of training; raises ConfigError."""
    ramp_up = args.dynapipe_ramp_up
    changes: dict[str, Any] = {
        "task_rates": read_meta(args.dynapipe_data).task_rates,
        "tokens_per_iteration": args.tokens_per_global_batch,
        "ramp_up": None if ramp_up is None else RampUp(start=ramp_up[0], increment=ramp_up[1], samples=ramp_up[2]),
        "last_batch": LastBatch(args.dynapipe_last_batch),
        "epochs": args.train_epochs,
    }
    return msgspec.structs.replace(settings, **changes)


def iterations_of_epochs(args: argparse.Namespace, settings: SamplerSettings) -> int | None:
    """The iterations of `--train-epochs`; None where it is not given.

    Raises:
        ConfigError: there is another end of training, or an epoch fills no batch.
        DataError: the dataset is missing or damaged.
    """
    if args.train_epochs is None:
        return None
    for name in ("train_iters", "train_samples"):
        if getattr(args, name, None) is not None:
            raise ConfigError(
                f"expected --train-epochs or --{name.replace('_', '-')}, got both",
                hint="--dynapipe-unset train-iters ignores that of a run file",
            )
    sampler = split_sampler(args.dynapipe_data, SplitSettings(name="train", sampler=of_training(args, settings)))
    count = sampler.batches.count
    assert count is not None, "the stream of epochs ends"
    return count
