"""Writing without losing; files of commands are held by tests/cli/test_outputs.py, datasets by tests/tools/prepare."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dynapipe import outputs
from megatron_dynapipe.core.errors import CheckpointError, ConfigError
from megatron_dynapipe.outputs import LOCK, lock_folder, say, warn

OURS = '{"format": "dynapipe-plan/1"}'


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("before", [None, "", OURS, '{"generator": "DynaPipe"}'])
def test_a_file_is_written_where_nothing_or_one_of_ours_was(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "deep" / "plan.json"
    if before is not None:
        path.parent.mkdir()
        path.write_text(before)
        path.chmod(0o640)
    outputs.write_file(path, OURS + "\n")
    assert path.read_text() == OURS + "\n" and names(path.parent) == ["plan.json"]
    assert before is None or path.stat().st_mode & 0o777 == 0o640


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "pipe"), (Path("/dev/full"), "device")):
        with pytest.raises(ConfigError, match=f"cannot write {path}: expected a regular file, found a {kind}"):
            outputs.write_file(path, OURS)
    assert names(tmp_path) == ["fifo"]


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "deep" / "made", tmp_path / "link"
    full = OSError(28, "No space left on device")
    of_torch = CheckpointException("write", {0: (full, [])})
    for error in (full, of_torch, ValueError("of something else")):
        kind = ValueError if isinstance(error, ValueError) else CheckpointError
        with pytest.raises(kind, match=r"deep/made: No space|something else"), outputs.fresh_folder(path) as fresh:
            raise [error, (fresh / "part").touch()][0]
        assert names(path.parent) == []
    path.mkdir()
    link.symlink_to(path)
    with outputs.fresh_folder(link) as fresh:
        (fresh / "whole").touch()
    assert link.is_symlink() and names(path) == ["whole"] and names(path.parent) == ["made"]
    assert path.stat().st_mode & 0o777 == 0o777 & ~outputs._umask()
    with pytest.raises(ConfigError, match="found files in it"), outputs.fresh_folder(path):
        pass
    assert names(path) == ["whole"]


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
        with pytest.raises(ConfigError, match=rf"the only run that writes checkpoints to .*, process {holder.pid} on "):
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


@pytest.mark.parametrize(("rank", "said"), [(None, "a line\n"), ("0", "a line\n"), ("3", "")])
def test_the_first_rank_alone_speaks_for_all_and_every_rank_warns(rank, said, monkeypatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    say("a line")
    warn("the disk is full")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (said, "warning: the disk is full\n")
