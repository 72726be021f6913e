"""Writing without losing: strangers are refused, links stay, a failure leaves what was there."""

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

    outputs.write_file(path, OURS + "\n")

    assert path.read_text() == OURS + "\n"
    assert names(path.parent) == ["plan.json"]


@pytest.mark.parametrize("kind", ["file", "folder", "pipe"])
def test_a_stranger_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    match kind:
        case "file":
            path.write_text("mine")
        case "folder":
            path.mkdir()
        case _:
            os.mkfifo(path)
    before = path.lstat()

    with pytest.raises(ConfigError, match=r"notes"):
        outputs.write_file(path, OURS)

    assert path.lstat() == before
    assert names(tmp_path) == ["notes"]


def test_a_link_stays_one_and_leads_to_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "plan.json"
    target.write_text(OURS)
    target.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(target)

    outputs.write_file(link, OURS + " ")

    assert link.is_symlink()
    assert target.read_text() == OURS + " "
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_one_line_with_the_path_and_leaves_the_old_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write /dev/full: expected a regular file, found a device"):
        outputs.write_file(Path("/dev/full"), OURS)

    path = tmp_path / "plan.json"
    path.write_text(OURS)
    with pytest.raises(OSError, match="full"), outputs.fresh_file(path):
        raise OSError(28, "disk full")

    assert path.read_text() == OURS
    assert names(tmp_path) == ["plan.json"]


def test_a_secret_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "url"

    outputs.write_file(path, "redis://:secret@here", mode=0o600)

    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "deep" / "made", tmp_path / "link"
    full = OSError(28, "No space left on device")
    of_torch = CheckpointException("write", {0: (full, [])})
    for error in (full, of_torch, ValueError("of something else")):
        wanted = ValueError if isinstance(error, ValueError) else CheckpointError
        with pytest.raises(wanted, match=r"deep/made: No space|something else"), outputs.fresh_folder(path) as fresh:
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


def test_a_folder_is_replaced_and_a_half_done_replacement_undone(tmp_path: Path) -> None:
    path, aside = tmp_path / "now", tmp_path / "aside"
    for name in ("now", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)

    outputs.replace_folder(tmp_path / "new", path, aside=aside)
    assert (path / "content").read_text() == "new"
    assert (aside / "content").read_text() == "now"

    path.rename(tmp_path / "lost")
    outputs.restore_folder(path, aside=aside)
    assert (path / "content").read_text() == "now"


def test_only_named_files_of_a_folder_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("train.bin", "tokenizer/vocabulary", "notes.txt"):
        (folder / name).write_text(name)
    mine = ["train.bin", "tokenizer/vocabulary", "never-written"]
    assert outputs.strangers(folder, mine) == ["notes.txt"]

    outputs.delete_folder(folder, mine)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]

    outputs.delete_folder(folder, ["notes.txt"])
    assert not folder.exists()
