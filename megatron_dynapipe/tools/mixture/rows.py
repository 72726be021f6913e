"""Sources of rows, whatever their form, as blocks of JSON lines in a fixed order.

    *.jsonl, .json       the file's own lines, a megabyte at a time; .gz and .zst are unpacked; or one array of rows
    *.csv                a header, then records
    *.parquet, *.arrow   record batches; also what `datasets` has on the hub or saved to disk

A block names its file and its first row, so that whoever finds a bad row can say which.
"""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.files import open_regular, read_up_to

BLOCK_BYTES = 1_000_000
MOST_LINE_BYTES = 64_000_000
"""Bytes of one row; more is no text that anybody has written."""
MOST_ARRAY_BYTES = 2_000_000_000
"""Bytes of a file that is one array of rows."""
_ROWS_AT_ONCE = 1000
_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
SUFFIXES = (*_LINES, ".csv", ".csv.gz", ".parquet", ".arrow")
_PACKED = (".gz", ".zst")
_UTF8_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some rows of a source.

    Attributes:
        file: where they come from, in words.
        unit: "line" or "row", with what they are numbered.
        first: number of the first one, from 1 for lines, 0 for rows.
        lines: one JSON object each, with a newline between them.
        done: bytes of the file that were read so far, for progress.
    """

    file: str
    unit: str
    first: int
    lines: bytes
    done: int


def files_of_source(source: str | Sequence[str], root: Path) -> list[Path]:
    """The files that paths, patterns and folders name, each list of matches in the order of names.

    Raises:
        DataError: nothing is there, or a file is of no known form.
    """
    files: list[Path] = []
    for entry in [source] if isinstance(source, str) else source:
        path = root / entry
        if path.is_dir():
            matches = sorted(match for match in path.rglob("*") if match.is_file() and _ending(match) in SUFFIXES)
        elif path.exists():
            matches = [path]
        else:
            base, pattern = (
                (Path(path.anchor), str(path.relative_to(path.anchor))) if path.is_absolute() else (Path(), str(path))
            )
            matches = sorted(file for file in base.glob(pattern) if file.is_file()) if set(entry) & set("*?[") else []
        if not matches:
            raise DataError(
                f"{path}: expected a file, a folder of files or a pattern, found none",
                hint=f"known are {', '.join(SUFFIXES)}",
            )
        files += matches
    return files


def form_of(path: Path) -> str:
    """The ending by which a file's form is known: `.jsonl.gz` for x.jsonl.gz; others are lines of JSON."""
    ending = _ending(path)
    if ending in SUFFIXES:
        return ending
    return ".jsonl" + (path.suffix.lower() if path.suffix.lower() in _PACKED else "")


def _ending(path: Path) -> str:
    return "".join(path.suffixes[-2:] if path.suffix.lower() in _PACKED else path.suffixes[-1:]).lower()


def file_blocks(path: Path) -> Iterator[Block]:
    """The rows of a file.

    Raises:
        DataError: it cannot be read, or is not of the form that its name says.
    """
    form = form_of(path)
    try:
        if form == ".parquet":
            size = path.stat().st_size
            rows = pq.read_metadata(path).num_rows
            yield from _table_blocks(str(path), _parquet(path), bytes_per_row=size / max(rows, 1))
        elif form == ".arrow":
            yield from _table_blocks(str(path), _arrow(path))
        else:
            with os.fdopen(open_regular(path), "rb") as raw:
                unpacked = _unpacked(path, raw)
                yield from (_csv_blocks if ".csv" in form else _json_blocks)(path, unpacked, raw)
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def hub_blocks(name: str, rows: Any) -> Iterator[Block]:
    """The rows of a `datasets.Dataset`."""
    tables = rows.with_format("arrow")
    batches = (tables[first : first + _ROWS_AT_ONCE] for first in range(0, len(tables), _ROWS_AT_ONCE))
    return _table_blocks(name, batches)


def rows_as_block(rows: Sequence[Any], file: str, first: int, done: int = 0) -> Block:
    """Rows in memory.

    Raises:
        DataError: a row holds what JSON cannot.
    """
    try:
        lines = b"\n".join(map(msgspec.json.encode, rows))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{file}, near row {first}: expected text, numbers and lists of these: {error}") from error
    return Block(file=file, unit="row", first=first, lines=lines, done=done)


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")  # type: ignore[no-any-return]
    return raw


def _json_blocks(path: Path, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    """The rows of a file of JSON: of an array, where it begins with one, else its lines."""
    head = _without_mark(path, file.read(BLOCK_BYTES))
    if head.lstrip().startswith(b"["):
        yield from _array_blocks(path, head, file, raw)
    else:
        yield from _line_blocks(path, head, file, raw)


def _array_blocks(path: Path, head: bytes, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    """The rows of one array, which is read whole."""
    content = head + read_up_to(file, MOST_ARRAY_BYTES)
    if len(content) > MOST_ARRAY_BYTES:
        raise DataError(
            f"{path}: expected an array of at most {MOST_ARRAY_BYTES} bytes, found more",
            hint="write one row on each line (JSON lines), which are read piece by piece",
        )
    try:
        rows = msgspec.json.decode(content, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: expected one array of rows, since it begins with [: {error}",
            hint="a file of JSON is an array of objects, or has one object on each line",
        ) from error
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        # Within JSON a line ends between values alone.
        lines = b"\n".join(bytes(row).replace(b"\n", b" ") for row in rows[first : first + _ROWS_AT_ONCE])
        yield Block(file=str(path), unit="row", first=first, lines=lines, done=raw.tell())


def _line_blocks(path: Path, chunk: bytes, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    """Whole lines of a file, about `BLOCK_BYTES` at a time, from the first such piece of it on."""
    first = 1
    rest = b""
    while chunk:
        whole, newline, end = chunk.rpartition(b"\n")
        if newline:
            lines = rest + whole
            yield Block(file=str(path), unit="line", first=first, lines=lines, done=raw.tell())
            first = first + lines.count(b"\n") + 1
            rest = end
        else:
            rest += chunk
        if len(rest) > MOST_LINE_BYTES:
            raise DataError(f"{path}, line {first}: expected at most {MOST_LINE_BYTES} bytes, found more")
        chunk = file.read(BLOCK_BYTES)
    if rest:
        yield Block(file=str(path), unit="line", first=first, lines=rest, done=raw.tell())


def _without_mark(path: Path, head: bytes) -> bytes:
    if (name := _OTHER_MARKS.get(head[:2])) is not None:
        raise DataError(
            f"{path}: expected UTF-8, found the byte order mark (BOM) of {name}",
            hint=f"convert it: iconv -f {name} -t UTF-8 {path.name}",
        )
    return head.removeprefix(_UTF8_MARK)


def _csv_blocks(path: Path, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, strict=True, restkey="")
    csv.field_size_limit(MOST_LINE_BYTES)
    rows: list[Any] = []
    first = size = 0
    try:
        for number, row in enumerate(reader):
            if "" in row or None in row.values():
                raise DataError(
                    f"{path}, row {number}: expected {len(reader.fieldnames or ())} fields, found another number"
                )
            rows.append(row)
            size += sum(map(len, row.values()))
            if size > BLOCK_BYTES:
                yield rows_as_block(rows, str(path), first, raw.tell())
                rows = []
                first = number + 1
                size = 0
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, after row {first + len(rows) - 1}: expected UTF-8: {error}") from error
    if rows:
        yield rows_as_block(rows, str(path), first, raw.tell())


def _parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)


def _arrow(path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            yield from reader


def _table_blocks(name: str, tables: Iterator[Any], *, bytes_per_row: float = 0.0) -> Iterator[Block]:
    """Record batches as blocks; a large batch as several.

    How far a compressed table is read, its rows do not say: by the file's bytes per row, where they are known.
    """
    first = 0
    for table in tables:
        at_once = max(1, min(_ROWS_AT_ONCE, table.num_rows * BLOCK_BYTES // max(table.nbytes, 1)))
        for start in range(0, table.num_rows, at_once):
            part = table.slice(start, at_once)
            if part.nbytes > MOST_LINE_BYTES:
                for row in range(part.num_rows):
                    if part.slice(row, 1).nbytes > MOST_LINE_BYTES:
                        raise DataError(
                            f"{name}, row {first + row}: expected at most {MOST_LINE_BYTES} bytes, found more"
                        )
            rows = part.to_pylist()
            yield rows_as_block(rows, name, first, round((first + len(rows)) * bytes_per_row))
            first += len(rows)
