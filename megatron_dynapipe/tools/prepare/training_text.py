"""Trains a tokenizer on a mixture's text, unless one is given."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.messages import RowError, texts_of
from megatron_dynapipe.tools.mixture.row_reader import read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.sources import Source
from megatron_dynapipe.tools.mixture.spec import Mixture, Objective, TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.settings import BadRows, PrepareSettings
from megatron_dynapipe.tools.prepare.tokenizer import SENTINELS, Tokenizer, load_tokenizer, train_tokenizer

TRAINING_BYTES = 500_000_000
"""Text that a tokenizer is trained on at most, an equal part of every entry's."""


def make_tokenizer(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> Tokenizer:
    """Load the tokenizer that was given, or train one on the mixture's text.

    Raises:
        DataError: the given one cannot be used, a row cannot be, or there is too little text to train on.
    """
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer, pad_token=settings.pad_token)
    corrupted = any(task.text and task.objective is Objective.SPAN_CORRUPTION for task in mixture.tasks)
    texts = _texts(mixture, sources, settings.bad_rows)
    return train_tokenizer(texts, settings.vocabulary_size, sentinels=SENTINELS if corrupted else 0)


def _texts(mixture: Mixture, sources: Sequence[Source], bad_rows: BadRows) -> Iterator[str]:
    """Give the texts to train on; raises DataError for a row that cannot be read, unless such rows are skipped."""
    allowed = TRAINING_BYTES // len(sources)
    for spec, source in zip(mixture.tasks, sources, strict=True):
        read = row_reader(spec)
        seen = 0
        for block in (block for part in source for block in part.blocks()):
            with bounded():
                rows = list(read_rows(block, read, functools.partial(_refuse, block, spec, bad_rows)))
            for _, (_, *values) in rows:
                said = values if spec.messages is None else itertools.chain(*map(texts_of, values[0].messages))
                yield from filter(None, said)
            seen += len(block.lines)
            if seen > allowed:
                break


def _refuse(block: Block, spec: TaskSpec, bad_rows: BadRows, number: int, error: RowError) -> None:
    if bad_rows is BadRows.FAIL:
        raise row_error(block, number, error, spec) from error
