"""Training, loading and using a HuggingFace tokenizer, offline."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_dynapipe.errors import DataError

PAD, BOS, EOS = "<pad>", "<s>", "</s>"

Tokenizer = Any
"""A `transformers.PreTrainedTokenizerBase`; the library carries no types."""


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: exactly `vocabulary_size` entries, the first three pad, start and end.

    The same texts give the same tokenizer. Nothing is added to a text that is encoded.

    Raises:
        DataError: the text is too small for that many entries.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, BOS, EOS],
        # All 256 bytes, so that no text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != vocabulary_size:
        raise DataError(
            f"expected text enough for a vocabulary of {vocabulary_size}, got {bpe.get_vocab_size()} entries out of it",
            hint="add text, or ask for a vocabulary of another size (at least 259: 256 bytes and 3 special tokens)",
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a tokenizer from a folder, without network and without running code from it.

    Raises:
        DataError: there is no tokenizer, or it has no pad or end token.
    """
    if not folder.is_dir():
        raise DataError(f"expected a tokenizer folder at {folder}, found none")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: expected a HuggingFace tokenizer, cannot load it: {error}") from error
    for name in ("pad", "eos"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise DataError(
                f"{folder}: expected a tokenizer with {name}_token, it has none",
                hint="set it in the tokenizer's tokenizer_config.json; a bare tokenizer.json has none",
            )
    return tokenizer


def start_id(tokenizer: Tokenizer) -> int:
    """The token that starts a decoder's input: the start token, or where there is none (as in T5's) the pad token."""
    return int(tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, with nothing added; text that reads like a special token is only text."""
    encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
    return [list(ids) for ids in encoded["input_ids"]]
