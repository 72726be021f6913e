"""Rows from JSON lines and HuggingFace datasets, and one clear error for each bad one."""

import gzip
import json
import os
from pathlib import Path

import datasets
import pytest

from megatron_dynapipe.data.prepare import TextSample
from megatron_dynapipe.data.sources import read_huggingface, read_jsonl
from megatron_dynapipe.errors import DataError

ROWS = [{"task": "a", "input": "one", "target": "1"}, {"task": "b", "input": "zwei ☃", "target": "2"}]
SAMPLES = [TextSample("a", "one", "1"), TextSample("b", "zwei ☃", "2")]


def test_json_lines(tmp_path: Path) -> None:
    content = "\n\n".join(json.dumps(row | {"id": 7}) for row in ROWS).encode()
    (tmp_path / "rows.jsonl").write_bytes(content)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(content))
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == SAMPLES
    assert list(read_jsonl(tmp_path / "rows.jsonl.gz")) == SAMPLES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"task": "a", "input": "x"}', "Object missing required field `target`"),
        ('{"task": "a", "input": 3, "target": "y"}', "Expected `str`, got `int` - at `$.input`"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"task": ', "truncated"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: expected an object with task, input and") as caught:
        list(read_jsonl(tmp_path / "rows.jsonl"))
    assert message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read it"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot read it"):
        list(read_jsonl(tmp_path / "rows.jsonl.gz"))


def test_huggingface_folder(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"dev": rows}).save_to_disk(tmp_path / "dict")
    assert list(read_huggingface(str(tmp_path / "one"))) == SAMPLES
    assert list(read_huggingface(str(tmp_path / "dict"), "dev")) == SAMPLES
    with pytest.raises(DataError, match="expected a HuggingFace dataset with a split 'train'"):
        list(read_huggingface(str(tmp_path / "dict")))


def test_huggingface_columns_and_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"task": "a", "question": "x"}]).save_to_disk(tmp_path / "columns")
    with pytest.raises(DataError, match=r"missing input, target \(it has task, question\)"):
        list(read_huggingface(str(tmp_path / "columns")))
    datasets.Dataset.from_list([ROWS[0], ROWS[1] | {"target": None}]).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match="row 1: expected text in task, input and target: Expected `str`, got `null`"):
        list(read_huggingface(str(tmp_path / "none")))


def test_huggingface_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a HuggingFace dataset with a split 'train'"):
        list(read_huggingface(str(tmp_path / "nowhere")))


def test_a_file_without_an_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", Path("/dev/zero")):
        with pytest.raises(DataError, match="expected a regular file"):
            list(read_jsonl(path))


def test_a_line_without_an_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dynapipe.data.sources.MOST_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(DataError, match="line 1: expected at most 1000 bytes"):
        list(read_jsonl(path))


def test_a_damaged_compressed_file_is_one_error(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b'{"task": "a", "input": "b", "target": "c"}\n' * 1000)
    for content in (whole[:-20], whole[:30] + bytes(20) + whole[50:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
            list(read_jsonl(path))
