"""Reading rows of (task, input, target) text from files and HuggingFace datasets."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.data.prepare import TextSample
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import open_regular

MOST_LINE_BYTES = 256_000_000
"""Of one row; more is no text that anybody has written."""

_DECODER = msgspec.json.Decoder(TextSample)


def read_jsonl(path: Path) -> Iterator[TextSample]:
    """Rows of a file of one JSON object per line (`.gz`: compressed); blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is not an object with text under task, input and target.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE_BYTES + 1), b""), start=1):
                if len(line) > MOST_LINE_BYTES:
                    raise DataError(f"{path}, line {number}: expected at most {MOST_LINE_BYTES} bytes, found more")
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def _row(path: Path, number: int, line: bytes) -> TextSample:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}, line {number}: expected an object with task, input and target: {error}",
            hint='one line is one sample: {"task": "…", "input": "…", "target": "…"}',
        ) from error


def read_huggingface(name: str, split: str = "train") -> Iterator[TextSample]:
    """Rows of a HuggingFace dataset: a folder written by `save_to_disk`, or anything `load_dataset` takes.

    Raises:
        DataError: it cannot be loaded, lacks a column of task, input and target, or a row has no text in one.
    """
    rows = _load(name, split)
    missing = [column for column in TextSample.__struct_fields__ if column not in rows.column_names]
    if missing:
        raise DataError(
            f"{name}: expected columns task, input and target, missing {', '.join(missing)}"
            f" (it has {', '.join(rows.column_names)})",
            hint="rename its columns with `datasets`, save it with save_to_disk and give that folder",
        )
    for number, row in enumerate(rows):
        try:
            yield msgspec.convert(row, TextSample)
        except msgspec.ValidationError as error:
            raise DataError(f"{name}, row {number}: expected text in task, input and target: {error}") from error


def _load(name: str, split: str) -> Any:
    """A `datasets.Dataset`, from a folder or by name."""
    import datasets

    try:
        if not (Path(name) / "state.json").is_file() and not (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_dataset(name, split=split)
        loaded = datasets.load_from_disk(name)
        return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{name}: expected a HuggingFace dataset with a split {split!r}: {error}") from error
