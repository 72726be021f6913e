"""The text before it is tokenised: the first rows of every file are checked, and a tokenizer is trained."""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture.fields import read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.messages import Conversation, RowError, texts_of
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.sources import Source
from megatron_dynapipe.tools.mixture.spec import Mixture, Objective, TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.encode import Encoder
from megatron_dynapipe.tools.prepare.settings import BadRows, PrepareSettings
from megatron_dynapipe.tools.prepare.tokenizer import (
    NO_CHAT_TEMPLATE,
    Tokenizer,
    load_tokenizer,
    sentinel_ids,
    train_tokenizer,
)

TRAINING_BYTES = 500_000_000
"""Text that a tokenizer is trained on at most, an equal part of every entry's."""
SENTINELS = 100
"""Sentinels of a tokenizer that is trained where spans of text are removed."""
_BYTES_AND_SPECIAL = 259
_FIRST_ROWS = 20


def check_first_rows(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> None:
    """Encode the first rows of every file, before anything that takes long; what they lack, all rows may lack.

    If a tokenizer is still to be trained, one of bytes stands in for it, and lengths are not compared.

    Raises:
        DataError: a file cannot be read, or one of these rows cannot be used; there is no chat template.
        ConfigError: a template cannot be parsed.
    """
    talks = any(spec.messages for spec in mixture.tasks)
    if talks and settings.tokenizer is None and mixture.chat_template is None:
        raise DataError(
            "expected a chat template for conversations, a tokenizer that is trained on their text has none",
            hint=NO_CHAT_TEMPLATE,
        )
    with tempfile.TemporaryDirectory(prefix="dynapipe-") as stand_in:
        folder = settings.tokenizer
        if folder is None:
            folder = Path(stand_in)
            train_tokenizer([], _BYTES_AND_SPECIAL + SENTINELS, sentinels=SENTINELS).save_pretrained(folder)
            settings = replace(settings, max_input_length=None, max_target_length=None)
        tokenizer = load_tokenizer(folder, pad_token=settings.pad_token)
        encode = Encoder(
            folder, mixture, settings, len(tokenizer), int(tokenizer.eos_token_id), sentinel_ids(tokenizer)
        )
        for task, source in enumerate(sources):
            for part in source:
                if (block := next(part.blocks(), None)) is not None:
                    rows = b"\n".join(block.lines.split(b"\n", _FIRST_ROWS)[:_FIRST_ROWS])
                    encode(replace(block, lines=rows), task)


def make_tokenizer(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> Tokenizer:
    """The tokenizer of a dataset: the one that was given, or one trained on the mixture's text.

    Raises:
        DataError: the given one cannot be used, a row cannot be, or there is too little text to train on.
    """
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer, pad_token=settings.pad_token)
    corrupted = any(task.text and task.objective is Objective.SPAN_CORRUPTION for task in mixture.tasks)
    texts = _texts(mixture, sources, settings.bad_rows)
    return train_tokenizer(texts, settings.vocabulary_size, sentinels=SENTINELS if corrupted else 0)


def _refuse(block: Block, spec: TaskSpec, bad_rows: BadRows, number: int, error: RowError) -> None:
    if bad_rows is BadRows.FAIL:
        raise row_error(block, number, error, spec) from error


def _texts_of(conversation: Conversation) -> Iterator[str]:
    return (text for message in conversation.messages for text in texts_of(message) if text)


def _texts(mixture: Mixture, sources: Sequence[Source], bad_rows: BadRows) -> Iterator[str]:
    """The texts that a tokenizer is trained on; raises DataError for rows that cannot be read, unless skipped."""
    allowed = TRAINING_BYTES // len(sources)
    for spec, source in zip(mixture.tasks, sources, strict=True):
        read = row_reader(spec)
        seen = 0
        for block in (block for part in source for block in part.blocks()):
            with bounded():
                rows = list(read_rows(block, read, functools.partial(_refuse, block, spec, bad_rows)))
            for _, (_, *values) in rows:
                yield from _texts_of(values[0]) if spec.messages is not None else values
            seen += len(block.lines)
            if seen > allowed:
                break
