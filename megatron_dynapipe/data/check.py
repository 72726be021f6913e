"""Checking a dataset folder fully: every file, every sample, every token."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_dynapipe.data.identity import changed_file, file_digest, meta_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, open_split, read_meta, tokenizer_folder
from megatron_dynapipe.data.tokenizer import fingerprint
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.lengths import read_task_ids

_MOST_NAMED = 5
_COPY = "the samples were encoded by another: copy the dataset again, or make it with `data prepare --tokenizer`"


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a dataset folder, in words; nothing where it is whole.

    Raises:
        DataError: there is no dataset, or its manifest is none.
    """
    meta = read_meta(folder)
    for name, expected in sorted(meta.files.items()):
        try:
            if (found := file_digest(folder / name)) != expected.quick:
                yield changed_file(folder / name, expected.quick, found).message
        except DataError as error:
            yield error.message
    try:
        check_tokenizer(folder, meta)
    except DataError as error:
        yield error.message
    for split in SPLITS:
        try:
            yield from _problems_of_split(folder, split, meta)
        except DataError as error:
            yield error.message


def check_tokenizer(folder: Path, meta: DatasetMeta) -> None:
    """Raise a DataError where the dataset's tokenizer is not the one that its manifest describes, or is missing."""
    path = tokenizer_folder(folder)
    try:
        found = fingerprint(path) if meta.tokenizer else ""
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected the dataset's tokenizer, cannot read it: {error}", hint=_COPY) from error
    if found != meta.tokenizer:
        raise DataError(
            f"{path}: expected the tokenizer that {meta_path(folder).name} describes (fingerprint {meta.tokenizer}),"
            f" found another (fingerprint {found})",
            hint=_COPY,
        )


def _problems_of_split(folder: Path, split: str, meta: DatasetMeta) -> Iterator[str]:
    reader = open_split(folder, split)
    ids = read_task_ids(folder, split, len(reader))
    if len(ids) and int(ids.max()) >= len(meta.tasks):
        yield f"{split}: expected task indices below {len(meta.tasks)}, got {ids.max()}"
    wrong = []
    for sample in range(len(reader)):
        try:
            tokens = reader[sample]
        except DataError as error:
            wrong.append(error.message)
            continue
        largest = max(int(part.max()) for part in tokens)
        smallest = min(int(part.min()) for part in tokens)
        if largest >= meta.vocabulary_size or smallest < 0:
            found = largest if smallest >= 0 else smallest
            wrong.append(f"{split}: expected tokens in 0…{meta.vocabulary_size - 1}, sample {sample} has {found}")
    yield from wrong[:_MOST_NAMED]
    if len(wrong) > _MOST_NAMED:
        yield f"{split}: {len(wrong) - _MOST_NAMED} more samples are wrong"
    for name, lengths, most in (
        ("input", reader.lengths.input, meta.max_input_length),
        ("target", reader.lengths.target, meta.max_target_length),
    ):
        longest = int(np.max(lengths, initial=0))
        if longest > most:
            yield f"{split}: expected {name}s of at most {most} tokens as the manifest says, got {longest}"
