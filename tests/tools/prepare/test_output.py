"""What `prepare` may replace: a dataset and nothing else; everything of the user's stays, and is named."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.tools.prepare import PrepareSettings, prepare_dataset, run
from tests.tools.prepare.test_run import files, prepare, text_samples


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a dataset."""
    folder = tmp_path_factory.mktemp("made") / "data"
    prepare(folder)
    return files(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


PROJECT = {"package.json": b"{}", "src/index.ts": b"main()"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"letter.txt": b"dear"}, "expected a dataset folder with a manifest.json"),
        (PROJECT | {"manifest.json": b'{"name": "my app", "icons": []}'}, "expected dynapipe-dataset/3"),
        (PROJECT | {"manifest.json": b'{"format": "dynapipe-dataset/4"}'}, "Invalid enum value"),
        (PROJECT | {"manifest.json": b"[" * 100_000}, "expected dynapipe-dataset/3"),
    ],
)
def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path, content: dict[str, bytes], said: str) -> None:
    folder = write(tmp_path / "site", content)
    with pytest.raises(DataError, match="to be absent, empty or a dataset folder, it is something else") as caught:
        prepare(folder)
    assert said in caught.value.message
    assert files(folder) == content
    assert names(tmp_path) == ["site"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "checkpoints/iter_0000002/model.pt", "tokenizer/notes.txt", "train.bin.backup", "rows.jsonl"]
)
def test_files_beside_a_dataset_are_named_and_stay(tmp_path: Path, made: dict[str, bytes], name: str) -> None:
    folder = write(tmp_path / "data", made | {name: b"mine"})
    with pytest.raises(DataError, match=f"expected nothing but a dataset in .*data, .* found {name}") as caught:
        prepare(folder, text_samples(30))
    assert "move that away" in str(caught.value)
    prepare(folder)  # made of the same already: nothing is to be replaced
    assert files(folder) == made | {name: b"mine"}
    assert names(tmp_path) == ["data"]


def test_links_beside_a_dataset_and_a_folder_where_it_would_be_made_stay(tmp_path, made) -> None:
    folder = write(tmp_path / "data", made)
    (folder / "runs").symlink_to(write(tmp_path / "runs", {"log": b"mine"}))
    with pytest.raises(DataError, match="found runs"):
        prepare(folder, text_samples(30))
    assert (folder / "runs" / "log").read_bytes() == b"mine"
    staging = write(tmp_path / ".other.prepare", {"thesis.tex": b"mine"})
    with pytest.raises(DataError, match=r"to hold an unfinished dataset, found thesis\.tex"):
        prepare(tmp_path / "other")
    assert (staging / "thesis.tex").read_bytes() == b"mine"


def test_a_file_that_comes_while_the_dataset_is_made_stays(tmp_path, made, monkeypatch):
    folder = write(tmp_path / "data", made)
    with monkeypatch.context() as patched:
        real = run.write_meta
        patched.setattr(run, "write_meta", lambda *args: (real(*args), write(folder, {"notes.txt": b"mine"})))
        with pytest.raises(DataError, match=r"found notes\.txt"):
            prepare(folder, text_samples(30))
    assert files(folder) == made | {"notes.txt": b"mine"}
    (folder / "notes.txt").unlink()
    assert sum(prepare(folder, text_samples(30)).split_samples.values()) == 30
    assert names(tmp_path) == ["data"]


def test_a_dataset_is_replaced(tmp_path: Path, made: dict[str, bytes]) -> None:
    """Also an empty folder; what was there is in the note."""
    folder = write(tmp_path / "data", made)
    settings = PrepareSettings(source="test", vocabulary_size=300)
    meta, notes = prepare_dataset(text_samples(30), folder, settings)
    assert meta.split_samples["train"] == 26
    assert notes == (
        f"replaced another dataset in {folder}: 40 samples of test, made of other sources or settings, or by an"
        " earlier version",
    )
    assert "nothing to do" in prepare_dataset(text_samples(30), folder, settings)[1][0]
    prepare(folder)
    assert files(folder) == made
    (tmp_path / "empty").mkdir()
    prepare(tmp_path / "empty")
    assert files(tmp_path / "empty") == made
    assert names(tmp_path) == ["data", "empty"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_one(tmp_path: Path, made: dict[str, bytes], is_there: bool) -> None:
    folder = tmp_path / "disk" / "data"
    folder.parent.mkdir()
    if is_there:
        write(folder, made)
    (tmp_path / "link").symlink_to(folder)
    prepare(tmp_path / "link", text_samples(30))
    assert (tmp_path / "link").is_symlink()
    assert sum(read_meta(folder).split_samples.values()) == 30
    assert names(tmp_path) == ["disk", "link"] and names(folder.parent) == ["data"]


def test_paths_that_cannot_be_written_are_one_line(tmp_path, made, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, said in (
        (tmp_path / "file" / "data", "Not a directory"),
        (tmp_path / "file", "it is something else"),
        (tmp_path / "loop", "loop"),
        (Path("/proc/data"), "/proc/.data.prepare: No such file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            prepare(path)
        assert "\n" not in caught.value.message
    write(tmp_path / "data", made)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match=r"cannot replace .*data: it is read-only"):
        prepare(tmp_path / "data", text_samples(30))


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file may have more than a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, made, no_room, monkeypatch):
    """The tokenizer's library has errors of its own."""
    monkeypatch.setattr(run, "check_first_rows", lambda *_: None)
    with pytest.raises(DataError, match="File too large") as caught:
        prepare(tmp_path / "data")
    assert "\n" not in caught.value.message and "data.prepare" in caught.value.message
    assert not (tmp_path / "data").exists()
