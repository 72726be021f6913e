"""The tokenizer of a dataset: the one that was given, or one trained on the mixture's text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dynapipe.data.mixture.fields import Message, RowError, column_reader, pair_reader, row_error
from megatron_dynapipe.data.mixture.sources import Source
from megatron_dynapipe.data.mixture.spec import Mixture, Objective, TaskSpec
from megatron_dynapipe.data.prepare.settings import PrepareSettings
from megatron_dynapipe.data.tokenizer import load_tokenizer, train_tokenizer

TRAINING_BYTES = 500_000_000
"""Text that a tokenizer is trained on at most, an equal part of every entry's."""
SENTINELS = 100
"""Of a tokenizer that is trained where spans of text are removed."""


def make_tokenizer(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings, folder: Path) -> None:
    """Write a tokenizer to a folder, which is there whole or not at all.

    Raises:
        DataError: the given one cannot be used, a row cannot be read, or there is too little text to train on.
    """
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer, pad_token=settings.pad_token)
    else:
        corrupted = any(task.text and task.objective is Objective.SPAN_CORRUPTION for task in mixture.tasks)
        tokenizer = train_tokenizer(
            _texts(mixture, sources), settings.vocabulary_size, sentinels=SENTINELS if corrupted else 0
        )
    part = folder.with_name(f"{folder.name}.part")
    tokenizer.save_pretrained(part)
    part.rename(folder)


def _texts(mixture: Mixture, sources: Sequence[Source]) -> Iterator[str]:
    allowed = TRAINING_BYTES // len(sources)
    for spec, source in zip(mixture.tasks, sources, strict=True):
        read, seen = _reader(spec), 0
        for block, _ in source.blocks():
            for number, line in enumerate(block.lines.split(b"\n"), start=block.first):
                if line and not line.isspace():
                    try:
                        yield from read(line)
                    except RowError as error:
                        raise row_error(block.file, block.unit, number, error) from error
            seen += len(block.lines)
            if seen > allowed:
                break


def _reader(spec: TaskSpec) -> Any:
    """From a line to its texts."""
    if spec.text is not None:
        one = column_reader(spec, spec.text)
        return lambda line: one(line)[1:]
    if spec.messages is not None:
        turns = column_reader(spec, spec.messages, list[Message])
        return lambda line: [message.content for message in turns(line)[1]]
    pair = pair_reader(spec)
    return lambda line: pair(line)[1:]
