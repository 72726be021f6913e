"""Killed at any point, `prepare` begins anew; done, it does nothing; never half a dataset."""

import errno
import fcntl
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.meta import DatasetMeta, read_meta
from megatron_dynapipe.tools.mixture import blocks
from megatron_dynapipe.tools.mixture.sources import open_sources
from megatron_dynapipe.tools.mixture.spec import plain_mixture
from megatron_dynapipe.tools.prepare import PrepareSettings, assemble, prepare_mixture, run, staging
from tests.tools.prepare.test_run import files, text_samples

LITTLE = 300
"""Bytes of a block: a dozen blocks."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", LITTLE)
    path = tmp_path / "rows.jsonl"
    made = [{"task": one.task, "input": one.input, "target": one.target} for one in text_samples()]
    path.write_text("\n".join(map(json.dumps, made)))
    return path


def prepare(source: Path, output: Path, **changes: Any) -> tuple[DatasetMeta, tuple[str, ...]]:
    mixture = plain_mixture((str(source),))
    settings = PrepareSettings(source="test", **{"vocabulary_size": 300} | changes)
    return prepare_mixture(mixture, open_sources(mixture, Path()), output, settings)


class Killed(BaseException):
    """As a signal would end it: nothing catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, calls: int) -> None:
    left, real = [calls], getattr(target, name)

    def wrapper(*args: Any, **arguments: Any) -> Any:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return real(*args, **arguments)

    monkeypatch.setattr(target, name, wrapper)


@pytest.mark.parametrize(
    ("target", "name", "calls"),
    [
        (run, "make_tokenizer", 0),
        (staging.Staging, "add", 7),
        (assemble, "_write_split", 1),
        (run, "write_meta", 0),
        (run, "replace_folder", 0),
    ],
)
def test_killed_it_begins_anew(tmp_path, source, monkeypatch, target, name, calls):
    prepare(source, tmp_path / "whole")
    with monkeypatch.context() as patched:
        kill_after(patched, target, name, calls)
        with pytest.raises(Killed):
            prepare(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert prepare(source, tmp_path / "data")[1] == ()
    assert files(tmp_path / "data") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl", "whole"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_two_renames(tmp_path, source, monkeypatch, renames):
    """The old dataset's and the new one's: the old one is back as long as there is no new one."""
    prepare(source, tmp_path / "data", vocabulary_size=301)
    with monkeypatch.context() as patched:
        kill_after(patched, Path, "rename", renames)
        if renames == 2:
            kill_after(patched, run, "_delete_replaced", 1)
        with pytest.raises(Killed):
            prepare(source, tmp_path / "data")
    if renames == 1:  # sources that cannot be used any more do not cost the old dataset
        with monkeypatch.context() as patched:
            kill_after(patched, run, "check_first_rows", 0)
            with pytest.raises(Killed):
                prepare(source, tmp_path / "data")
        assert read_meta(tmp_path / "data").vocabulary_size == 301
    assert prepare(source, tmp_path / "data")[0].vocabulary_size == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "rows.jsonl"]


def test_done_it_does_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(source, tmp_path / "data")
    kill_after(monkeypatch, run, "replace_folder", 0)
    again = prepare(source, tmp_path / "data", workers=2)
    assert first[1] == () and "is made of the same already: nothing to do" in again[1][0]
    assert again[0] == first[0]
    with pytest.raises(Killed):
        prepare(source, tmp_path / "data", valid_fraction=0.1)
    with source.open("a") as file:
        file.write('\n{"task": "copy", "input": "new", "target": "row"}')
    with pytest.raises(Killed):
        prepare(source, tmp_path / "data")


def test_another_tokenizer_is_noticed(tmp_path: Path, source: Path) -> None:
    for size in (300, 310):
        prepare(source, tmp_path / str(size), vocabulary_size=size)
    one = prepare(source, tmp_path / "data", tokenizer=tmp_path / "300" / "tokenizer")
    two = prepare(source, tmp_path / "data", tokenizer=tmp_path / "310" / "tokenizer")
    assert one[0].tokenizer != two[0].tokenizer == read_meta(tmp_path / "310").tokenizer


def test_a_full_disk(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(source, tmp_path / "whole")
    real, left = os.fsync, [3]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="expected room on the disk, it is full") as caught:
            prepare(source, tmp_path / "data")
    assert "make room" in str(caught.value)
    assert not (tmp_path / "data").exists()
    prepare(source, tmp_path / "data")
    assert files(tmp_path / "data") == files(tmp_path / "whole")


def test_two_at_once(tmp_path: Path, source: Path) -> None:
    (tmp_path / ".data.prepare").mkdir()
    descriptor = os.open(tmp_path / ".data.prepare", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"expected nobody else to make .*data, another process does"):
        prepare(source, tmp_path / "data")
    os.close(descriptor)
    assert prepare(source, tmp_path / "data")[1] == ()


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_give_the_same_bytes(tmp_path: Path, source: Path, monkeypatch, capfd, workers: int) -> None:
    prepare(source, tmp_path / "here")
    monkeypatch.setattr(run, "_LITTLE_BYTES", 0)
    prepare(source, tmp_path / "there", workers=workers)
    assert files(tmp_path / "here") == files(tmp_path / "there")
    assert "Warning" not in capfd.readouterr().err, "of a worker that starts"


def test_an_error_of_a_process(tmp_path: Path, source: Path, monkeypatch) -> None:
    with source.open("a") as file:
        file.write('\n{"task": "copy", "input": "new", "target": ""}\n')
    monkeypatch.setattr(run, "_LITTLE_BYTES", 0)
    with pytest.raises(DataError, match=r"line 41 \(task 'copy'\): expected every target to have at least 1") as caught:
        prepare(source, tmp_path / "data", workers=2)
    assert "--skip-empty" in str(caught.value)


def test_a_process_that_ends(tmp_path: Path, source: Path, monkeypatch) -> None:
    """Nobody stays behind."""

    def kill_workers(*arguments: Any) -> None:  # one alone may be noticed once the other has done the work
        real(*arguments)
        for child in multiprocessing.active_children():
            child.kill()

    monkeypatch.setattr(run, "_LITTLE_BYTES", 0)
    with monkeypatch.context() as patched:
        real = staging.Staging.add
        patched.setattr(staging.Staging, "add", kill_workers)
        with pytest.raises(DataError, match="a process that tokenises has ended before its work") as caught:
            prepare(source, tmp_path / "data", workers=2)
    assert "--workers 1" in str(caught.value) and not multiprocessing.active_children()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
