"""Which dataset a folder holds: digests that change with its files, checksums that change with its samples."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_dynapipe import digests
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import check_files, checksums_path
from megatron_dynapipe.data.indexed import IndexedReader
from megatron_dynapipe.data.meta import check_tokenizer, read_meta
from megatron_dynapipe.digests import file_digest
from megatron_dynapipe.tools.prepare import PrepareSettings, TextSample, prepare_dataset


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [TextSample(task="a", input=f"number {at} and so on", target=f"{at * at}") for at in range(200)]
    folder = tmp_path_factory.mktemp("made") / "data"
    prepare_dataset(samples, folder, PrepareSettings(source="numbers", vocabulary_size=300))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


def change(path: Path, place: int, byte: int | None = None) -> None:
    """Overwrite one byte, in place, as a running copy would."""
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1 if byte is None else byte]))


def test_a_prepared_dataset_describes_its_files(prepared: Path) -> None:
    meta = read_meta(prepared)
    assert sorted(meta.files) == sorted(
        f"{split}{ending}"
        for split in ("train", "valid", "test")
        for ending in (".bin", ".idx", ".ends.npy", ".tasks.npy", ".crc32.npy")
    )
    assert check_files(prepared, ("train", "valid", "test"), meta.files) == {
        name: digests.quick for name, digests in meta.files.items()
    }


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.tasks.npy", "test.crc32.npy"])
def test_a_changed_file_is_named(folder: Path, name: str) -> None:
    change(folder / name, (folder / name).stat().st_size - 1)
    assert name in check_files(folder, ("train", "valid", "test"), {}), "nothing to be held against"
    with pytest.raises(DataError, match=f"{name}: expected the file that manifest.json describes"):
        check_files(folder, ("train", "valid", "test"), read_meta(folder).files)


@pytest.mark.parametrize(
    ("place", "changes"), [(0, True), (99_999, True), (50_000, True), (1_000, True), (2_500, False), (97_000, False)]
)
def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch, place: int, changes: bool) -> None:
    """Head, tail and blocks in between; what lies between blocks, samples' checksums find."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 50_000)
    monkeypatch.setattr(digests, "PART_BYTES", 2_000)
    monkeypatch.setattr(digests, "PARTS", 5)
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(100_000))
    before = file_digest(path)
    change(path, place)
    assert (file_digest(path) != before) == changes


def test_digests_of_other_sizes_and_of_what_is_no_file(tmp_path: Path) -> None:
    digests = set()
    for size in (0, 1, 2, 5_000_000):
        (tmp_path / "file").write_bytes(bytes(size))
        digests.add(file_digest(tmp_path / "file"))
    assert len(digests) == 4
    os.mkfifo(tmp_path / "fifo")
    for name, said in (("none", "No such file"), ("fifo", "expected a regular file, found a pipe")):
        with pytest.raises(DataError, match=said):
            file_digest(tmp_path / name)


def test_a_sample_overwritten_while_it_is_mapped_is_found_when_it_is_read(folder: Path) -> None:
    reader = IndexedReader(folder / "train")
    sizes = reader.lengths.input + reader.lengths.target
    reader[7]
    change(folder / "train.bin", int(sizes[:7].sum()) * reader.dtype.itemsize)
    with pytest.raises(DataError, match=r"train\.bin: the tokens of sample 7 are not those that were written"):
        reader[7]
    for sample in (6, 8):
        reader[sample]


def test_a_dataset_without_checksums_must_not_change_while_it_is_read(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron_dynapipe.data.indexed.LOOK_S", 0.0)
    checksums_path(folder / "train").unlink()
    change(folder / "train.bin", 0)
    reader = IndexedReader(folder / "train")
    assert len(reader[0]) == 2
    os.utime(folder / "train.bin", (0, 0))
    with pytest.raises(DataError, match=r"train\.bin: expected the file as it was opened, it has been changed since"):
        reader[0]


def test_verify_checks_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(folder)]) == 0
    assert "200 samples are as they were written" in capsys.readouterr().out
    change(folder / "train.bin", 0, 255)
    assert main(["data", "verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "train.bin: expected the file that manifest.json describes" in said
    assert "the tokens of sample 0 are not those that were written" in said
    checksums_path(folder / "train").unlink()
    change(folder / "train.bin", 1, 255)
    assert main(["data", "verify", str(folder)]) == 1
    assert "expected tokens in 0…299, sample 0 has 65535" in capsys.readouterr().out
    shutil.copy(checksums_path(folder / "valid"), checksums_path(folder / "train"))
    with pytest.raises(DataError, match=r"train\.crc32\.npy: expected uint32\[\d+\]"):
        IndexedReader(folder / "train")


@pytest.mark.parametrize("content", ["{}", None])
def test_another_tokenizer_is_named(folder: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    check_tokenizer(folder, read_meta(folder))
    path = folder / "tokenizer" / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer: expected the tokenizer that manifest\.json describes") as caught:
        check_tokenizer(folder, read_meta(folder))
    assert "copy the dataset again" in str(caught.value)
    assert main(["data", "verify", str(folder)]) == 1
    assert caught.value.message in capsys.readouterr().out
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(DataError, match="expected the dataset's tokenizer, cannot read it"):
        check_tokenizer(folder, read_meta(folder))
