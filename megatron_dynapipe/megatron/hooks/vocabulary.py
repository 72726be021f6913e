"""The vocabulary of a run: its padded size, and the tokenizer, which is read once somebody asks for more than a size.

Megatron reads a run's tokenizer on every rank, to pad its vocabulary. The dataset's manifest has that size, and planned
runs need nothing else, so they save the second that importing `transformers` takes.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megatron_dynapipe.core.units import round_up
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder
from megatron_dynapipe.megatron.hooks.originals import Replacement

_CHANGES = ("special_tokens", "metadata_path", "tokenizer_special_tokens", "tokenizer_metadata")
"""Arguments that make another tokenizer of the same folder; 0.18 has the last two."""


def pad_vocabulary(args: argparse.Namespace, tokens: int) -> None:
    """Pad a vocabulary as Megatron does, unless it is padded already."""
    if args.padded_vocab_size is None:
        args.padded_vocab_size = round_up(tokens, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)


class UnreadTokenizer:
    """A tokenizer in Megatron's place for one, which is read at the first use of anything but `vocab_size`.

    Args:
        vocab_size: tokens, special ones included.
        read: makes the tokenizer.
    """

    def __init__(self, vocab_size: int, read: Callable[[], Any]) -> None:
        self.vocab_size = vocab_size
        self._read = functools.cache(read)

    def __getattr__(self, name: str) -> object:
        if name == "_read" or name.startswith("__"):  # copying looks for these before there is anything to read
            raise AttributeError(name)
        return getattr(self._read(), name)


def _reading_later(build_tokenizer: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(build_tokenizer)
    def build(args: argparse.Namespace, **keywords: object) -> object:
        if not _is_of_dataset(args):
            return build_tokenizer(args, **keywords)
        tokens = read_meta(args.dynapipe_data).vocabulary_size
        if getattr(args, "pad_vocab_size", True):  # always, in 0.18
            pad_vocabulary(args, tokens)
        return UnreadTokenizer(tokens, lambda: build_tokenizer(args, **keywords))

    return build


def _is_of_dataset(args: argparse.Namespace) -> bool:
    """Whether a run's tokenizer is the dataset's as it stands there."""
    changed = any(getattr(args, name, None) for name in _CHANGES)
    folder = None if args.dynapipe_data is None else str(tokenizer_folder(args.dynapipe_data))
    return args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model == folder and not changed


TABLE: tuple[Replacement, ...] = (
    Replacement(
        owner="megatron.training.global_vars",
        name="build_tokenizer",
        make=_reading_later,
        parameters=("args",),
        optional=True,
        why="reads the tokenizer as soon as arguments are parsed",
    ),
)
"""What is replaced while arguments are parsed."""
