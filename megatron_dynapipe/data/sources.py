"""Reading rows of (task, input, target) text from files and HuggingFace datasets."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.data.prepare import TextSample
from megatron_dynapipe.errors import DataError

_DECODER = msgspec.json.Decoder(TextSample)


def read_jsonl(path: Path) -> Iterator[TextSample]:
    """Rows of a file of one JSON object per line (`.gz`: compressed); blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is not an object with text under task, input and target.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def _row(path: Path, number: int, line: bytes) -> TextSample:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
