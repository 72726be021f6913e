"""Reads rows of any form as blocks of JSON lines, in a fixed order.

    *.jsonl, .json       the file's own lines, a megabyte at a time; or one array of rows
    *.csv, *.tsv         a header, then records; these and JSON also as .gz, .bz2 and .zst
    *.parquet, *.arrow   record batches; also what `datasets` has on the hub or saved to disk

A block names its file and its first row, so that whoever finds a bad row can say which.
"""

import bz2
import csv
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.files import open_regular, read_up_to

BLOCK_BYTES = 1_000_000
MOST_LINE_BYTES = 64_000_000
"""Bytes of one row; more is no text that anybody has written."""
MOST_ARRAY_BYTES = 2_000_000_000
"""Bytes of a file that is one array of rows."""
_ROWS_AT_ONCE = 1000
_ROWS_UNPACKED = 64
_PACKED = (".gz", ".bz2", ".zst")
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*_TEXTS, *(text + packed for text in _TEXTS for packed in _PACKED), ".parquet", ".arrow")
_TEXTS_OF_ARROW = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
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


def form_of(path: Path) -> str:
    """Tell a file's form by its name: `.jsonl.gz` for x.jsonl.gz; unknown names are lines of JSON."""
    ending = ending_of(path)
    if ending in SUFFIXES:
        return ending
    return ".jsonl" + (path.suffix.lower() if path.suffix.lower() in _PACKED else "")


def ending_of(path: Path) -> str:
    """What a file's name ends in, with what it is packed by: `.csv.gz`."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() in _PACKED else path.suffixes[-1:]).lower()


def file_blocks(path: Path, needed: Collection[str] = (), *, drops_nulls: bool = False) -> Iterator[Block]:
    """Read the rows of a file.

    Args:
        path: the file.
        needed: columns of bytes that are no text are an error where they are among these, and left out otherwise.
        drops_nulls: whether nulls inside a table's values are left out: all rows of a table have all keys of any.

    Raises:
        DataError: it cannot be read, or is not of the form that its name says.
    """
    form = form_of(path)
    try:
        if form == ".parquet":
            size = path.stat().st_size
            rows = pq.read_metadata(path).num_rows
            yield from table_blocks(str(path), _parquet(path), needed, drops_nulls, bytes_per_row=size / max(rows, 1))
        elif form == ".arrow":
            yield from table_blocks(str(path), _arrow(path), needed, drops_nulls)
        else:
            with os.fdopen(open_regular(path), "rb") as raw:
                unpacked = _unpacked(path, raw)
                is_table = form.startswith((".csv", ".tsv"))
                yield from (_csv_blocks if is_table else _json_blocks)(path, unpacked, raw)
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error) as error:
        raise DataError(f"{path}: cannot read it: {error}") from error


def hub_blocks(name: str, rows: Any, needed: Collection[str] = (), *, drops_nulls: bool = False) -> Iterator[Block]:
    """Read the rows of a `datasets.Dataset`, with the arguments of `file_blocks`."""
    return table_blocks(name, rows.with_format("arrow").iter(_ROWS_AT_ONCE), needed, drops_nulls)


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
    if path.suffix.lower() == ".bz2":
        return bz2.BZ2File(raw)  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")  # type: ignore[no-any-return]
    return raw


def _json_blocks(path: Path, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    """Read a file of JSON: an array if it begins with one, or else lines."""
    head = _without_mark(path, file.read(BLOCK_BYTES))
    if head.lstrip().startswith(b"["):
        yield from _array_blocks(path, head, file, raw)
    else:
        yield from _line_blocks(path, head, file, raw)


def _array_blocks(path: Path, head: bytes, file: BinaryIO, raw: BinaryIO) -> Iterator[Block]:
    """Read the rows of one array, which has to be read whole."""
    content = read_up_to(file, MOST_ARRAY_BYTES + 1, head=head)
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
    """Read whole lines, about `BLOCK_BYTES` at a time; `chunk` is the first piece of the file."""
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
    csv.field_size_limit(MOST_LINE_BYTES)
    rows: list[Any] = []
    first = size = taken = 0

    def lines() -> Iterator[str]:
        """Read the file's lines, and bound the bytes of a record, which may have several."""
        nonlocal taken
        while line := text.readline(MOST_LINE_BYTES + 1 - taken):
            taken += len(line)
            if taken > MOST_LINE_BYTES:
                raise DataError(
                    f"{path}, row {first + len(rows)}: expected at most {MOST_LINE_BYTES} bytes, found more",
                    hint="look for a quotation mark that nothing closes",
                )
            yield line

    try:
        left = lines()
        header = next(left, "")
        delimiter = max(",;\t", key=header.count)
        reader = csv.DictReader(itertools.chain([header], left), strict=True, delimiter=delimiter)
        for number, row in enumerate(reader):
            taken = 0
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, row {number}: expected {len(reader.fieldnames or ())} fields, found another number"
                )
            row.pop("", None)  # the index that pandas writes
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


def _parquet(path: Path) -> Iterator[object]:
    """Tables of about `BLOCK_BYTES`, of few rows at a time: a small file may hold one long text for all of them."""
    waiting: list[object] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_UNPACKED):
            waiting.append(batch)
            if len(waiting) * _ROWS_UNPACKED >= _ROWS_AT_ONCE or sum(map(_plain_bytes, waiting)) >= BLOCK_BYTES:
                yield pa.Table.from_batches(waiting)
                waiting.clear()
    if waiting:
        yield pa.Table.from_batches(waiting)


def _plain_bytes(table: Any) -> int:
    """Count the bytes of a table's values; a dictionary's values count as often as rows name them."""
    size: int = table.nbytes
    for field in table.schema:
        if pa.types.is_dictionary(field.type) and field.type.value_type in _TEXTS_OF_ARROW:
            column = table[field.name]
            for chunk in getattr(column, "chunks", [column]):
                size += pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
    return size


def _arrow(path: Path) -> Iterator[object]:
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            yield from reader


def table_blocks(
    name: str,
    tables: Iterator[Any],
    needed: Collection[str] = (),
    drops_nulls: bool = False,
    *,
    bytes_per_row: float = 0.0,
) -> Iterator[Block]:
    """Record batches as blocks; a large batch as several.

    How far a compressed table is read, its rows do not say: by the file's bytes per row, where they are known.
    """
    first = 0
    for table in tables:
        at_once = max(1, min(_ROWS_AT_ONCE, table.num_rows * BLOCK_BYTES // max(_plain_bytes(table), 1)))
        for start in range(0, table.num_rows, at_once):
            part = table.slice(start, at_once)
            if _plain_bytes(part) > MOST_LINE_BYTES:
                for row in range(part.num_rows):
                    if _plain_bytes(part.slice(row, 1)) > MOST_LINE_BYTES:
                        raise DataError(
                            f"{name}, row {first + row}: expected at most {MOST_LINE_BYTES} bytes, found more"
                        )
            rows = _rows_of_table(name, part, needed, drops_nulls=drops_nulls)
            yield rows_as_block(rows, name, first, round((first + len(rows)) * bytes_per_row))
            first += len(rows)


def _rows_of_table(name: str, table: Any, needed: Collection[str], *, drops_nulls: bool) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for field in table.schema:
        plain = _plain(field.type, drops_nulls=drops_nulls)
        values = table[field.name].to_pylist()
        try:
            columns[field.name] = values if plain is None else [None if one is None else plain(one) for one in values]
        except ValueError as error:
            if field.name in needed:
                raise DataError(f"{name}: expected text in the column {field.name}: {error}") from error
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(kind: Any, *, drops_nulls: bool) -> Callable[[Any], Any] | None:
    """Find the function that turns values of an Arrow type into text, numbers, lists and objects; None if they are.

    Bytes are UTF-8, as old writers store text; `datasets` stores values of mixed types as JSON.
    """
    if kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        return bytes.decode
    if getattr(kind, "extension_name", "") == "arrow.json":
        return msgspec.json.decode
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_item = _plain(kind.value_type, drops_nulls=drops_nulls)
        return of_item and (lambda items: [item if item is None else of_item(item) for item in items])
    if not pa.types.is_struct(kind):
        return None
    of_fields = {field.name: _plain(field.type, drops_nulls=drops_nulls) for field in kind}
    if not drops_nulls and not any(of_fields.values()):
        return None

    def plain(value: dict[str, Any]) -> dict[str, Any]:
        there = {key: of_field for key, of_field in of_fields.items() if not drops_nulls or value[key] is not None}
        return {
            key: value[key] if of_field is None or value[key] is None else of_field(value[key])
            for key, of_field in there.items()
        }

    return plain
