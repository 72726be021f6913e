"""Writing without losing; files of commands are held by tests/cli/test_outputs.py, datasets by tests/tools/prepare."""

import os
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dynapipe import outputs
from megatron_dynapipe.errors import CheckpointError, ConfigError

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
