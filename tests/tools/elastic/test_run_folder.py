"""The folder of a run: what is deleted there, what a kill leaves, and who may save."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe import outputs
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.outputs import LOCK, lock_folder
from megatron_dynapipe.tools.elastic import run_folder
from megatron_dynapipe.tools.elastic.run_folder import RECORD, RunFolder


class Killed(BaseException):
    """The process ends here."""


def save(folder: RunFolder, iteration: int, content: str = "state") -> None:
    fresh = folder.begin(iteration)
    fresh.mkdir()
    for part in "ab":
        (fresh / part).write_text(content)
    folder.complete(fresh, iteration)


def opened(path: Path) -> tuple[RunFolder, str]:
    folder = RunFolder(path)
    return folder, folder.open(wait_s=0)


def checkpoints(path: Path) -> dict[str, str]:
    """Content of the folders that are whole."""
    folders = [each for each in path.iterdir() if each.is_dir()]
    parts = {each.name: {(each / part).read_text() for part in "ab" if (each / part).exists()} for each in folders}
    return {name: "".join(content) for name, content in sorted(parts.items())}


def test_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    folder, last = opened(tmp_path / "run")
    assert last == ""
    for iteration in (2, 4):
        save(folder, iteration)
    save(folder, 4, "again")
    assert checkpoints(tmp_path / "run") == {"iteration_0000004": "again"}
    assert opened(tmp_path / "run")[1] == "iteration_0000004"
    assert {each.name for each in (tmp_path / "run").iterdir()} == {"iteration_0000004", LOCK, RECORD}


def test_files_of_other_nodes_that_show_late_are_the_runs(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path)
    save(folder, 2)
    (tmp_path / "iteration_0000002" / "__3_0.distcp").touch()
    save(folder, 4)
    assert set(checkpoints(tmp_path)) == {"iteration_0000004"}


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


USERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a copy under another name": ("iteration_0000002_best", lambda path: path.mkdir()),
    "a checkpoint of another run": ("iteration_0000001", lambda path: path.mkdir()),
    "notes beside the state": ("iteration_0000002", lambda path: (path / "notes.txt").write_text("the best")),
    "a folder that looks unfinished": ("iteration_0000004.unfinished", lambda path: path.mkdir()),
    "a folder that looks replaced": ("iteration_0000002.replaced", lambda path: path.mkdir()),
    "a checkpoint moved to another disk": ("iteration_0000002", link),
}


@pytest.mark.parametrize("case", USERS)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_the_user_put_there_stays(tmp_path: Path, case: str, restarts: bool) -> None:
    folder, _ = opened(tmp_path)
    save(folder, 2)
    name, change = USERS[case]
    change(tmp_path / name)
    before = {each: each.read_bytes() for each in (tmp_path / name).rglob("*")}
    if restarts:
        folder, _ = opened(tmp_path)
    for iteration in (2, 4, 4, 6):
        save(folder, iteration, f"{iteration}")
    assert (tmp_path / "iteration_0000006").is_dir() and not (tmp_path / "iteration_0000004").exists()
    kept = [each for each in tmp_path.iterdir() if each.name.startswith(name)]
    assert any({each / path.name: data for path, data in before.items()}.items() <= contents(each) for each in kept)


def contents(folder: Path) -> Any:
    return {each: each.read_bytes() for each in folder.rglob("*")}.items()


@pytest.mark.parametrize("content", [b"", b"{}x", b"\xff", b'{"waste": [""]}', b'{"waste": ["../user"]}'])
def test_a_record_that_cannot_be_read_deletes_nothing(tmp_path: Path, content: bytes) -> None:
    folder, _ = opened(tmp_path)
    save(folder, 2)
    (tmp_path / RECORD).write_bytes(content)
    user = tmp_path.with_name("user")
    user.mkdir(exist_ok=True)
    folder, last = opened(tmp_path)
    assert last == "iteration_0000002"
    save(folder, 4)
    assert set(checkpoints(tmp_path)) == {"iteration_0000002", "iteration_0000004"}
    save(folder, 6)
    assert set(checkpoints(tmp_path)) == {"iteration_0000002", "iteration_0000006"} and user.exists()


def fail_at(step: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error before a step of the file system's, or in the middle of one that deletes a folder."""
    left = [step]

    def counted(function: Callable[..., Any], *, is_tree: bool = False) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                for each in list(Path(path).iterdir())[:1] if is_tree else ():
                    each.unlink()
                raise error
            return function(path, *more, **named)

        return call

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(run_folder.shutil, "rmtree", counted(run_folder.shutil.rmtree, is_tree=True))


@pytest.mark.parametrize("iteration", [pytest.param(4, id="the same again"), pytest.param(6, id="the next")])
@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_kill_or_an_error_at_any_step_loses_no_checkpoint(tmp_path, iteration, error):
    """Once the old copy of the same iteration was deleted before the new one had its name."""
    for step in range(1, 100):
        path = tmp_path / str(step)
        folder, _ = opened(path)
        save(folder, 4, "old")
        with pytest.MonkeyPatch.context() as patched:
            fail_at(step, error, patched)
            try:
                save(folder, iteration, "new")
            except error:
                is_failed = True
            else:
                is_failed = False
        if error is Killed:
            folder, last = opened(path)
            found = checkpoints(path)
            assert found[last] in ("old", "new"), f"killed at step {step}: {found}"
            assert all(found.values()), f"killed at step {step}: {found}"
        else:
            folder.begin(8)
            assert set(checkpoints(path).values()) & {"old", "new"}, f"failed at step {step}: {checkpoints(path)}"
        save(folder, 8, "next")
        assert checkpoints(path) == {"iteration_0000008": "next"}, f"failed at step {step}"
        if not is_failed:
            assert step > 5
            return
    pytest.fail("it never ended")


HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_dynapipe.outputs import lock_folder
lock_folder(Path(sys.argv[1]), wait_s=0)
if os.fork():
    print("held", flush=True)
time.sleep(60)
"""


def test_one_run_at_a_time_saves_to_a_folder(tmp_path, capsys, monkeypatch):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"the only run that saves to .*, process {holder.pid} on "):
            lock_folder(tmp_path, wait_s=0.5)
        assert "waiting for process" in capsys.readouterr().out
        holder.kill()
        lock_folder(tmp_path, wait_s=10)  # a process that it forked still runs
        os.killpg(holder.pid, signal.SIGKILL)
    lock_folder(tmp_path, wait_s=0)
    monkeypatch.chdir(tmp_path)
    lock_folder(Path("msc://bucket/saved"), wait_s=0)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK], "nothing is made for a folder of no file system"
    with pytest.raises(ConfigError, match=rf"cannot write checkpoints to .*{LOCK}: "):
        lock_folder(tmp_path / LOCK, wait_s=0)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(outputs.fcntl, "flock", refuse)
    lock_folder(tmp_path, wait_s=0)
    assert "cannot be locked (Operation not supported)" in capsys.readouterr().out
