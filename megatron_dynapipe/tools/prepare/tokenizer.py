"""Trains, loads and reads HuggingFace tokenizers, offline."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_dynapipe.core.errors import DataError, DynaPipeError
from megatron_dynapipe.files import read_bounded

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SENTINEL = "<extra_id_{}>"
"""A token that stands for a removed span, by its number."""
SENTINELS = 100
"""Sentinels of a tokenizer that is trained where spans of text are removed."""
NO_CHAT_TEMPLATE = "pass --tokenizer of a chat model, or write a Jinja template into the mixture file (docs/data.md)"
"""A hint where there is no chat template."""

Tokenizer = Any
"""A `transformers.PreTrainedTokenizerBase`; the library carries no types."""


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, *, sentinels: int = 0) -> Tokenizer:
    """Train a byte-level BPE tokenizer: exactly `vocabulary_size` entries, the first three pad, start and end.

    The same texts give the same tokenizer. Nothing is added to a text that is encoded.

    Args:
        texts: read once.
        vocabulary_size: entries, special ones among them.
        sentinels: entries that stand for removed spans, as a T5's.

    Raises:
        DataError: the text is too small for that many entries.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, BOS, EOS, *map(SENTINEL.format, range(sentinels))],
        # All 256 bytes, so that no text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != vocabulary_size:
        raise DataError(
            f"expected text enough for a vocabulary of {vocabulary_size}, got {bpe.get_vocab_size()} entries out of it",
            hint=f"add text, or pass --vocabulary-size {bpe.get_vocab_size()} or less (at least 259: 256 bytes and 3"
            " special tokens)",
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS)


_Vocabulary = dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**24)]] | list[Any]


def check_ids(path: Path) -> None:
    """Check the ids of a `tokenizer.json`: for a large one the library asks for as much memory.

    Raises:
        DataError: an id is none, or the file is none of a tokenizer.
        OSError: it cannot be read.
    """
    try:
        content = msgspec.json.decode(read_bounded(path), type=dict[str, object])
        model = msgspec.convert(content.get("model"), dict[str, Any])
        msgspec.convert(model.get("vocab", []), _Vocabulary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: expected a HuggingFace tokenizer, found another file: {error}") from error


def load_tokenizer(folder: Path, *, pad_token: str | None = None) -> Tokenizer:
    """Load a tokenizer from a folder, without network and without running code from it.

    Args:
        folder: as `save_pretrained` writes it.
        pad_token: of its vocabulary, to pad with in place of its own.

    Raises:
        DataError: there is no tokenizer, or it has no end token.
    """
    if not folder.is_dir():
        raise DataError(f"expected a tokenizer folder at {folder}, found none")
    try:
        if (folder / "tokenizer.json").is_file():
            check_ids(folder / "tokenizer.json")
            # Imports no torch, which takes half a gigabyte.
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        tokenizer = Loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except DynaPipeError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise DataError(f"{folder}: expected a HuggingFace tokenizer, cannot load it: {error}") from error
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise DataError(f"{folder}: expected a pad token of its vocabulary, got {pad_token!r}")
        tokenizer.pad_token = pad_token
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{folder}: expected a tokenizer with eos_token, it has none",
            hint="set it in the tokenizer's tokenizer_config.json; a bare tokenizer.json has none",
        )
    return tokenizer


def pad_id(tokenizer: Tokenizer) -> int:
    """The token that fills padded rows, where it never counts: the pad token, or where there is none the end token."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def start_id(tokenizer: Tokenizer) -> int:
    """The token that starts a decoder's input: the start token, or where there is none (as in T5's) the pad token."""
    return pad_id(tokenizer) if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that stand for removed spans, in order; none where a tokenizer has none."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    ids: list[int] = []
    while (token := SENTINEL.format(len(ids))) in vocabulary:
        ids.append(vocabulary[token])
    return tuple(ids)
