"""Batches files (`dynapipe-batches/1`): the lengths of global batches, without the samples."""

import re
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_unpacked
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import ModelFamily

FORMAT = "dynapipe-batches/1"

_Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class NamedBatch(msgspec.Struct, frozen=True):
    """One global batch: lengths in tokens; `target` is absent for decoder-only models. Other keys are ignored."""

    id: str
    input: list[_Length]
    target: list[_Length] | None = None

    def global_batch(self, iteration: int) -> GlobalBatch:
        """The batch as the planner takes it, its samples numbered by their place."""
        targets = self.target or [0] * len(self.input)
        return GlobalBatch(
            iteration=iteration,
            sample_ids=np.arange(len(self.input)),
            input_lengths=np.array(self.input, np.int32),
            target_lengths=np.array(targets, np.int32),
        )


class _File(msgspec.Struct, frozen=True):
    format: str
    batches: list[NamedBatch]


def read_batches(path: Path, family: ModelFamily, *, max_seq_len: int | None = None) -> list[NamedBatch]:
    """The batches of a file that are of the given kind: with targets for T5, without for decoder-only models.

    Args:
        path: the file (`.gz`: compressed).
        family: kind of model.
        max_seq_len: longer inputs and targets are truncated to it.

    Raises:
        DataError: no such file, not of this format, an id that is no name or not the only one, input and target of
            different numbers, or none of this kind.
    """
    try:
        file = msgspec.json.decode(read_unpacked(path), type=_File)
    except OSError as error:
        raise DataError(f"cannot read the batches {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a batches file: {error}") from error
    if file.format != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT!r}, got {file.format!r}")
    _check_ids(path, file.batches)
    for batch in file.batches:
        if batch.target is not None and len(batch.target) != len(batch.input):
            raise DataError(f"{path}: batch {batch.id} has {len(batch.input)} inputs and {len(batch.target)} targets")
    chosen = [batch for batch in file.batches if (batch.target is not None) == (family is ModelFamily.T5)]
    if not chosen:
        kind = "with" if family is ModelFamily.T5 else "without"
        raise DataError(f"{path}: expected batches {kind} targets for a {family} model, found none")
    return chosen if max_seq_len is None else [_truncated(batch, max_seq_len) for batch in chosen]


def _check_ids(path: Path, batches: list[NamedBatch]) -> None:
    """Plans are written to files of these names."""
    seen = set()
    for batch in batches:
        if not _NAME.fullmatch(batch.id):
            raise DataError(
                f"{path}: expected ids of 1 to 128 letters, digits, dots, dashes or underscores, got {batch.id!r}",
                hint="an id is a name, not a path: plans are written to files of these names",
            )
        if batch.id in seen:
            raise DataError(f"{path}: expected every id once, got {batch.id!r} twice")
        seen.add(batch.id)


def _truncated(batch: NamedBatch, most: int) -> NamedBatch:
    target = None if batch.target is None else [min(n, most) for n in batch.target]
    return NamedBatch(id=batch.id, input=[min(n, most) for n in batch.input], target=target)
