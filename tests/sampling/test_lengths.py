"""Reading lengths from an index: a good file's values, and one clear error for each way a file can be bad."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling.lengths import (
    HEADER,
    MAGIC,
    LengthTable,
    ends_path,
    read_index,
    read_task_ids,
    task_ids_path,
)

LENGTHS = [3, 1, 5, 2]


def write_split(
    folder: Path,
    lengths: list[int],
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    code: int = 8,
    pointers: list[int] | None = None,
    documents: list[int] | None = None,
    data_bytes: int | None = None,
    cut: int | None = None,
) -> Path:
    """A split named "train", written by hand so that every field can be wrong."""
    if pointers is None:
        pointers = [2 * sum(lengths[:at]) for at in range(len(lengths))]
    if documents is None:
        documents = list(range(0, len(lengths) + 1, 2))
    content = HEADER.pack(magic, version, code, len(lengths), len(documents))
    content += struct.pack(f"<{len(lengths)}i", *lengths)
    content += struct.pack(f"<{len(pointers)}q", *pointers)
    content += struct.pack(f"<{len(documents)}q", *documents)
    (folder / "train.idx").write_bytes(content[:cut])
    (folder / "train.bin").write_bytes(bytes(2 * sum(lengths) if data_bytes is None else data_bytes))
    return folder / "train"


def test_reads_lengths_by_sample(tmp_path: Path) -> None:
    index = read_index(write_split(tmp_path, LENGTHS))
    assert index.dtype == np.uint16
    assert (index.sequence_pointers.tolist(), index.document_index.tolist()) == ([0, 6, 8, 18], [0, 2, 4])
    table = LengthTable.read(tmp_path, "train")
    assert len(table) == 2 and table.input.dtype == table.target.dtype == np.int32
    assert (table.input.tolist(), table.target.tolist()) == ([3, 5], [1, 2])
    with pytest.raises(DataError, match=r"got arrays of shapes \(2,\) and \(1,\)"):
        LengthTable(input=np.ones(2, np.int32), target=np.ones(1, np.int32))


def test_each_family_has_its_ends(tmp_path: Path) -> None:
    """An encoder alone reads what ends an input; a T5 adds a target's end token by itself."""
    write_split(tmp_path, LENGTHS)
    assert LengthTable.read(tmp_path, "train", ModelFamily.GPT).input.tolist() == [3, 5]
    np.save(ends_path(tmp_path / "train"), np.array([1, 0, 2, 1], np.uint8))
    as_read = {None: ([3, 5], [1, 2]), ModelFamily.GPT: ([2, 3], [1, 2]), ModelFamily.T5: ([3, 5], [1, 1])}
    for family, lengths in as_read.items():
        table = LengthTable.read(tmp_path, "train", family)
        assert (table.input.tolist(), table.target.tolist()) == lengths
        assert table.input.dtype == table.target.dtype == np.int32
    np.save(ends_path(tmp_path / "train"), np.array([1, 0], np.uint8))
    with pytest.raises(DataError, match=r"train\.ends\.npy: expected uint8\[4\], "):
        LengthTable.read(tmp_path, "train", ModelFamily.T5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"magic": b"NOTMEGATR"}, "expected the magic b'MMIDIDX\\x00\\x00', got b'NOTMEGATR'"),
        ({"version": 2}, "expected index version 1, got 2"),
        ({"code": 9}, "expected a token type code in 1…8, got 9"),
        ({"cut": 20}, "expected at least 34 bytes, got 20"),
        ({"cut": -1}, "expected 106 bytes for 4 sequences and 3 document boundaries, got 105"),
        ({"pointers": [0, 6, 10, 18]}, "expected sequence 2 at byte 8 of the data file, the index says 10"),
        ({"data_bytes": 21}, "train.bin: expected 22 bytes as its index says, got 21"),
        ({"data_bytes": 23}, "train.bin: expected 22 bytes as its index says, got 23"),
        ({"documents": [0, 1, 2, 3, 4]}, "expected 2 documents of two sequences each, got 4 documents of 4 sequences"),
        ({"documents": [0, 1, 4]}, "expected 2 documents of two sequences each, got 2 documents"),
        ({"lengths": [3, 1, 5]}, "expected an even number of sequences (input, target, input, target, …), got 3"),
        ({"lengths": [3, 1, 0, 2, 0, 1]}, "every input to have at least 1 token, sample 1 has 0 (2 such samples)"),
        ({"lengths": [3, 1, 5, 0]}, "every target to have at least 1 token, sample 1 has 0 (1 such samples)"),
        ({"lengths": [3, -1]}, "train.idx: expected lengths of at least 0, sequence 1 has -1"),
    ],
)
def test_refuses_damaged_index(tmp_path: Path, wrong: dict[str, object], message: str) -> None:
    write_split(tmp_path, **{"lengths": LENGTHS} | wrong)
    with pytest.raises(DataError) as caught:
        LengthTable.read(tmp_path, "train")
    assert message in str(caught.value)


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a dataset folder at .*nowhere, found none"):
        LengthTable.read(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match=r"expected the dataset file .*valid\.idx, found none"):
        LengthTable.read(tmp_path, "valid")
    write_split(tmp_path, LENGTHS)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(DataError, match=r"expected the dataset file .*train\.bin, found none"):
        LengthTable.read(tmp_path, "train")


def test_task_ids(tmp_path: Path) -> None:
    path = task_ids_path(tmp_path, "train")
    np.save(path, np.array([0, 2, 1], np.int16))
    assert read_task_ids(tmp_path, "train", 3).tolist() == [0, 2, 1]
    with pytest.raises(DataError, match=r"expected int16\[4\], got int16\[3\]"):
        read_task_ids(tmp_path, "train", 4)
    np.save(path, np.array([0, -1], np.int16))
    with pytest.raises(DataError, match="expected task indices of at least 0, got -1"):
        read_task_ids(tmp_path, "train", 2)
    path.write_bytes(b"no array")
    with pytest.raises(DataError, match=r"expected int16\[\d+\], cannot read it"):
        read_task_ids(tmp_path, "train", 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '''''''",
        b"\x93NUMPY\x01\x00\x05\x00((((\n",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i2', 'fortran_order': False, 'shape': (1000000000000000,), }",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"PK\x03\x04nothing",
        b"\x80\x04K\x01.",
    ],
)
def test_task_ids_that_are_no_array_are_one_error(tmp_path, content) -> None:
    task_ids_path(tmp_path, "train").write_bytes(content)
    with pytest.raises(DataError, match=r"train\.tasks\.npy: expected"):
        read_task_ids(tmp_path, "train", 2)


def test_files_without_an_end_and_indices_of_more_sequences_than_bytes(tmp_path) -> None:
    (tmp_path / "train.bin").write_bytes(b"")
    for sequences in (2**40, 2**62, 2**64 - 1):
        (tmp_path / "train.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, sequences, 1) + bytes(100))
        with pytest.raises(DataError, match=r"expected .* bytes"):
            LengthTable.read(tmp_path, "train")
    for name in ("train.idx", "train.bin", "train.tasks.npy"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="expected"):
        read_task_ids(tmp_path, "train", 2)
    with pytest.raises(DataError, match="expected the dataset file"):
        LengthTable.read(tmp_path, "train")
