"""Every form of a source gives the same rows, in blocks that know their place."""

import csv
import gzip
import io
import itertools
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture import blocks as blocks_module
from megatron_dynapipe.tools.mixture.blocks import file_blocks
from megatron_dynapipe.tools.mixture.sources import files_of_source, open_sources
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec

ROWS = [{"task": "a", "input": 'one, two\n"three"', "target": str(at)} for at in range(50)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def as_csv() -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["task", "input", "target"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), buffer, row_group_size=7)
    return buffer.getvalue()


def arrow(make: object) -> bytes:
    buffer, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with make(buffer, table.schema) as writer:  # type: ignore[operator]
        writer.write_table(table, max_chunksize=7)
    return buffer.getvalue()


FORMS = {
    "rows.jsonl": LINES,
    "rows.json": b"\xef\xbb\xbf" + LINES.rstrip(),
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.jsonl.zst": zstd(LINES),
    "rows.csv": as_csv(),
    "rows.csv.gz": gzip.compress(b"\xef\xbb\xbf" + as_csv()),
    "rows.parquet": parquet(),
    "rows.arrow": arrow(pa.ipc.new_stream),
    "file.arrow": arrow(pa.ipc.new_file),
}


def read(path: Path) -> list[object]:
    return [json.loads(line) for block in file_blocks(path) for line in block.lines.split(b"\n")]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("block_bytes", [100, 500, 1_000_000])
def test_every_form_gives_the_rows(tmp_path: Path, monkeypatch, name: str, block_bytes: int) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", block_bytes)
    (tmp_path / name).write_bytes(FORMS[name])
    assert read(tmp_path / name) == ROWS
    blocks = list(file_blocks(tmp_path / name))
    assert len(blocks) > 1 or block_bytes == 1_000_000
    done = [block.done for block in blocks]
    assert done == sorted(done) and (done[-1] == (tmp_path / name).stat().st_size or name.endswith(".arrow"))
    start = blocks[0].first
    for block in blocks:
        assert block.first == start
        start += block.lines.count(b"\n") + 1


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b/two.jsonl", "a/one.parquet", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    names = [path.name for path in files_of_source(".", tmp_path)]
    assert names == ["one.parquet", "two.jsonl"]
    assert [path.name for path in files_of_source(["b", "*/*.parquet"], tmp_path)] == ["two.jsonl", "one.parquet"]
    for missing in ("c", "*.csv"):
        with pytest.raises(DataError, match="expected a file, a folder of files or a pattern, found none"):
            files_of_source(missing, tmp_path)


def test_saved_datasets(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"dev": rows}).save_to_disk(tmp_path / "org" / "dict")
    for task, hub_root in (
        (TaskSpec(name="a", source="one"), None),
        (TaskSpec(name="a", hub=str(tmp_path / "one")), None),
        (TaskSpec(name="a", hub="org/dict", split="dev"), tmp_path),
    ):
        (source,) = open_sources(Mixture(tasks=(task,)), tmp_path, hub_root=hub_root)
        (part,) = source
        assert [json.loads(line) for block in part.blocks() for line in block.lines.split(b"\n")] == ROWS
        assert part.fingerprint() == part.fingerprint()
    (tmp_path / "org" / "scripted").mkdir()
    (tmp_path / "org" / "scripted" / "scripted.py").write_text("raise SystemExit")
    for name, message in (("dict", "'train'"), ("scripted", "'train': Dataset scripts are no longer supported")):
        with pytest.raises(DataError, match=f"expected a HuggingFace dataset with a split {message}") as error:
            open_sources(Mixture(tasks=(TaskSpec(name="a", hub=f"org/{name}"),)), tmp_path, hub_root=tmp_path)
        assert "one that needs a script of its own is not run: convert it to parquet" in error.value.hint


def test_whoever_waits_for_the_hub_is_told(tmp_path: Path, monkeypatch, capsys) -> None:
    """Without a network it is tried for minutes."""

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    for hub_root, told in ((None, "asking the hub for org/rows"), (tmp_path, "")):
        with pytest.raises(DataError, match="no route"):
            open_sources(Mixture(tasks=(TaskSpec(name="a", hub="org/rows"),)), tmp_path, hub_root=hub_root)
        assert capsys.readouterr().err.startswith(told) and bool(told) == (hub_root is None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "cannot read it"),
        ("rows.jsonl.gz", gzip.compress(b"x" * 1000)[:-9], "cannot read it"),
        ("rows.jsonl.gz", gzip.compress(LINES)[:30] + bytes(20) + gzip.compress(LINES)[50:], "cannot read it"),
        ("rows.jsonl.zst", zstd(LINES)[:-5], "cannot read it"),
        ("rows.parquet", parquet()[:-9], "cannot read it"),
        ("rows.arrow", b"x" * 100, "cannot read it"),
        ("rows.jsonl", b"\xff\xfe{", "the byte order mark (BOM) of UTF-16"),
        ("rows.json", b'[{"a": 1}', "expected one array of rows, since it begins with [: Input data was truncated"),
        ("rows.json", b"[1]\n[2]", "expected one array of rows, since it begins with ["),
        ("rows.csv", b"task,input\na,b\nc\n", "row 1: expected 2 fields, found another number"),
        ("rows.csv", b"task,input\na,b\nc,\xff\n", "expected UTF-8"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(file_blocks(tmp_path / name))
    assert message in caught.value.message
    assert name in caught.value.message


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None) -> None:
    """A file of JSON that is one array, as Alpaca's, on one line or on many."""
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=indent).encode()))
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 100)
    monkeypatch.setattr(blocks_module, "_ROWS_AT_ONCE", 20)
    assert read(path) == ROWS
    assert [(block.unit, block.first) for block in file_blocks(path)] == [("row", 0), ("row", 20), ("row", 40)]
    monkeypatch.setattr(blocks_module, "MOST_ARRAY_BYTES", 1000)
    with pytest.raises(DataError, match="expected an array of at most 1000 bytes, found more") as caught:
        read(path)
    assert "JSON lines" in caught.value.hint


def test_a_large_row_is_one_row(tmp_path: Path) -> None:
    """Ten megabytes, in pieces of one."""
    row = json.dumps({"task": "a", "input": "word " * 2_000_000, "target": "y"}).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + row + b"\n{}")
    blocks = list(file_blocks(path))
    lines = {block.first + at: line for block in blocks for at, line in enumerate(block.lines.split(b"\n"))}
    rows = LINES.count(b"\n")
    assert sorted(lines) == list(range(1, rows + 3))
    assert lines[rows + 1] == row and lines[rows + 2] == b"{}"


def test_a_row_of_a_table_is_bounded_as_a_line_is(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_LINE_BYTES", 5_000)
    texts = ["a" * 4_000] * 3
    pq.write_table(pa.table({"input": texts}), tmp_path / "many.parquet")
    assert sum(block.lines.count(b"input") for block in file_blocks(tmp_path / "many.parquet")) == 3
    pq.write_table(pa.table({"input": [*texts, "a" * 6_000]}), tmp_path / "long.parquet")
    with pytest.raises(DataError, match=r"long\.parquet, row 3: expected at most 5000 bytes"):
        list(file_blocks(tmp_path / "long.parquet"))


@pytest.mark.parametrize("dictionary", [True, False])
def test_one_long_text_for_all_rows_of_a_small_table_is_unpacked_row_by_row(tmp_path: Path, dictionary: bool) -> None:
    text, indices = pa.array(["word " * 40_000]), pa.array([0] * 1000)
    column = pa.DictionaryArray.from_arrays(indices, text)
    table = pa.table({"text": column if dictionary else column.dictionary_decode()})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "rows.parquet").stat().st_size < 100_000
    blocks = list(itertools.islice(file_blocks(tmp_path / "rows.parquet"), 6))
    assert len(blocks) == 6 and all(len(block.lines) < 2_000_000 for block in blocks)
    assert json.loads(blocks[5].lines.splitlines()[-1]) == {"text": "word " * 40_000}


def test_a_line_without_an_end_is_not_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 600)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" + bytes(100_000)))
    with pytest.raises(DataError, match="line 2: expected at most 1000 bytes"):
        list(file_blocks(path))


ENDLESS = {"line": b"x" * 100_000, "field": b'"' + b"x\n" * 50_000, "fields": b'"\n",' * 25_000}


@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_a_record_without_an_end_is_not_read(tmp_path: Path, monkeypatch, endless: bytes) -> None:
    monkeypatch.setattr(blocks_module, "MOST_LINE_BYTES", 1000)
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 300 + endless))
    with pytest.raises(DataError, match="row 300: expected at most 1000 bytes"):
        list(file_blocks(path))
    path.write_bytes(gzip.compress(endless))
    with pytest.raises(DataError, match="row 0: expected at most 1000 bytes"):
        list(file_blocks(path))
