"""Tables give the rows that were put into them: no nulls of a unified schema, no bytes, no JSON in JSON; and splits."""

import bz2
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture.row_reader import read_rows, row_reader
from megatron_dynapipe.tools.mixture.sources import open_sources
from megatron_dynapipe.tools.mixture.spec import InputAndTarget, Mixture, TaskSpec


def read(root: Path, **task: Any) -> list[tuple[Any, ...]]:
    """What the rows of an entry say."""
    spec = TaskSpec(**{"name": "n"} | task)
    (source,) = open_sources(Mixture(tasks=(spec,)), root, hub_root=root)
    reader = row_reader(spec)

    def refuse(number: int, error: Exception) -> None:
        raise AssertionError(number) from error

    blocks = (block for part in source for block in part.blocks())
    return [values[1:] for block in blocks for _, values in read_rows(block, reader, refuse)]


def conversation(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {key: {"type": "x"} for key in arguments}
    tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": messages, "tools": [tool]}


ROWS = [conversation("w", {"city": "Oslo"}), conversation("add", {"x": 1, "y": {"z": None}})]


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved", "jsonl"])
def test_nulls_of_a_tables_schema_are_absent(tmp_path: Path, form: str) -> None:
    """At every depth of messages, calls and tools; in JSON lines they stay, since somebody wrote them."""
    table = pa.Table.from_pylist(ROWS)
    source = f"rows.{form}"
    if form == "parquet":
        pq.write_table(table, tmp_path / source)
    elif form == "arrow":
        with pa.ipc.new_file(tmp_path / source, table.schema) as writer:
            writer.write_table(table)
    elif form == "saved":
        datasets.Dataset(table).save_to_disk(tmp_path / source)
    else:
        (tmp_path / source).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    read_calls = [
        conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
        for (conversation,) in read(tmp_path, source=source, messages="messages")
    ]
    assert read_calls == [{"city": "Oslo"}, {"x": 1, "y": {"z": None} if form == "jsonl" else {}}]
    tools = [conversation.tools for (conversation,) in read(tmp_path, source=source, messages="messages")]
    names = [set(tool["function"]["parameters"]["properties"]) for (tool,) in tools if tool is not None]
    assert names == [{"city"}, {"x", "y"}]


@pytest.mark.parametrize("form", ["saved", "parquet", "hub", "texts"])
def test_columns_of_json(tmp_path: Path, form: str) -> None:
    """`datasets` stores values of mixed types as JSON, with a type of its own; others store JSON as text."""
    json_type = datasets.Json()
    features = datasets.Features({"messages": datasets.List(json_type), "tools": datasets.List(json_type)})
    rows = datasets.Dataset.from_list(ROWS, features=features)
    if form in ("saved", "hub"):
        rows.save_to_disk(tmp_path / "rows")
    elif form == "parquet":
        (tmp_path / "rows").mkdir()
        rows.to_parquet(tmp_path / "rows" / "rows.parquet")
    else:
        (tmp_path / "rows").mkdir()
        texts = [{key: list(map(json.dumps, values)) for key, values in row.items()} for row in ROWS]
        pq.write_table(pa.Table.from_pylist(texts), tmp_path / "rows" / "rows.parquet")
    found = read(tmp_path, messages="messages", **({"hub": "rows"} if form == "hub" else {"source": "rows"}))
    assert [{"messages": row.messages, "tools": row.tools} for (row,) in found] == ROWS


def test_bytes_are_text_or_refused(tmp_path: Path) -> None:
    """Old writers store text as bytes; pictures in a column that nobody reads are left alone."""
    columns = {"input": pa.array(["café".encode()], pa.binary()), "target": ["x"], "picture": [b"\xff\xd8"]}
    nested = pa.array(
        [[{"role": b"user", "content": b"q"}]], pa.list_(pa.struct({"role": pa.binary(), "content": pa.binary()}))
    )
    pq.write_table(pa.table(columns | {"m": nested}), tmp_path / "rows.parquet")
    assert read(tmp_path, source="rows.parquet") == [("café", "x")]
    ((conversation,),) = read(tmp_path, source="rows.parquet", messages="m")
    assert conversation.messages == [{"role": "user", "content": "q"}]
    columns_read = InputAndTarget(input="picture", target="target")
    for task in ({"columns": columns_read}, {"template": "{{ picture }}|||x"}, {"messages": "picture"}):
        with pytest.raises(DataError, match=r"rows\.parquet: expected text in the column picture: .*utf-8"):
            read(tmp_path, source="rows.parquet", **task)


def pairs(split: str) -> bytes:
    return json.dumps({"input": split, "target": "y"}).encode()


def test_a_folder_of_several_splits_is_asked_about(tmp_path: Path) -> None:
    """Test files are never trained on unseen; `split`, or patterns, say which are meant."""
    for name in ("train-00000-of-00001", "test-00000-of-00001", "dev"):
        (tmp_path / "data" / "deep").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "deep" / f"{name}.jsonl").write_bytes(pairs(name.partition("-")[0]))
    for name in ("dataset_infos.json", "deep/state.json", ".cache.json"):
        (tmp_path / "data" / name).write_text("{}")
    for source in ("data", "data/**/*.jsonl"):
        with pytest.raises(
            DataError, match=r"expected files of one split, their names say several: train \(train-0"
        ) as caught:
            read(tmp_path, source=source)
        assert "validation (dev.jsonl), test (test-0" in caught.value.message and "`split: train`" in caught.value.hint
    assert read(tmp_path, source="data", split="train") == [("train", "y")]
    assert (
        read(tmp_path, source="data", split="validation")
        == read(tmp_path, source="data", split="dev")
        == [("dev", "y")]
    )
    assert read(tmp_path, source=("data/deep/tr*", "data/deep/te*")) == [("train", "y"), ("test", "y")]
    assert read(tmp_path, source="data/deep/test-00000-of-00001.jsonl") == [("test", "y")]
    with pytest.raises(DataError, match="a folder of files or a pattern of other, found none"):
        read(tmp_path, source="data", split="other")


def test_folders_that_say_no_or_one_split(tmp_path: Path) -> None:
    for name in ("latest.jsonl", "attest/contrained.jsonl", "evaluations.jsonl", "train/a.jsonl", "train/train2.jsonl"):
        (tmp_path / "contest" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "contest" / name).write_bytes(pairs(name))
    assert len(read(tmp_path, source="contest")) == 5


def test_saved_datasets_in_one_entry(tmp_path: Path) -> None:
    for name in ("one", "two"):
        datasets.Dataset.from_list([{"input": name, "target": "y"}]).save_to_disk(tmp_path / name)
    (tmp_path / "three.jsonl").write_bytes(pairs("three"))
    assert read(tmp_path, source=("one", "two", "three.jsonl")) == [("one", "y"), ("two", "y"), ("three", "y")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.csv", b",input,target\n0,007,NA\n1,a,b\n"),
        ("rows.tsv", b"input\ttarget\n007\tNA\na\tb\n"),
        ("rows.csv", b"input;target\n007;NA\na;b\n"),
        ("rows.csv.bz2", bz2.compress(b"input,target\n007,NA\na,b\n")),
        ("rows.jsonl.bz2", bz2.compress(b'{"input": "007", "target": "NA"}\n{"input": "a", "target": "b"}\n')),
    ],
)
def test_tables_of_text(tmp_path: Path, name: str, content: bytes) -> None:
    """With the index that pandas writes, with tabs or semicolons, packed; nothing is taken for a number."""
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path, source=name) == [("007", "NA"), ("a", "b")]
    assert read(tmp_path, source=".") == [("007", "NA"), ("a", "b")]
