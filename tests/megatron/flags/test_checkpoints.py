"""Trackers that Megatron would leave a run for, or begin anew without: refused, and no file changed."""

import argparse
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.flags import checkpoints
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER, check_trackers

CONTENTS = [b"", b"\n", b"latest", b"-3", b"1.5", b"7 8", b"iter_0000007", b"\xff\xfe7", bytes(4), b"9" * 200]


def arguments(**folders: object) -> argparse.Namespace:
    given = {"load": None, "save": None, "pretrained_checkpoint": None, "ckpt_step": None}
    given["exit_on_missing_checkpoint"] = False
    return argparse.Namespace(**given | {name: str(folder) for name, folder in folders.items()})


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "metadata.json").write_text("{}")
    return folder


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("flag", ["load", "save", "pretrained_checkpoint", "non_persistent_global_ckpt_dir"])
@pytest.mark.parametrize("content", [*CONTENTS, "٧".encode(), "folder", "link"])
def test_a_tracker_that_says_no_iteration_is_refused(tmp_path: Path, content: bytes | str, flag: str) -> None:
    tracker = checkpoint(tmp_path, "iter_0000007") / TRACKER
    if isinstance(content, bytes):
        tracker.write_bytes(content)
    elif content == "folder":
        tracker.mkdir()
    else:
        tracker.symlink_to(tmp_path / "nowhere")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=TRACKER) as caught:
        check_trackers(arguments(**{flag: tmp_path}))
    assert "\n" not in caught.value.message and "write the number" in str(caught.value.hint)
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ["7", "7\n", " 0000007 ", "release"])
def test_one_that_megatron_reads_is_taken(tmp_path: Path, text: str) -> None:
    (checkpoint(tmp_path, "iter_0000007") / TRACKER).write_text(text)
    check_trackers(arguments(load=tmp_path, save=tmp_path))


@pytest.mark.parametrize(
    ("version", "files", "taken"),
    [
        ("0.18.0", [".metadata"], False),
        ("0.18.3", [".metadata", "common.pt"], True),
        ("0.18.3", ["model_optim_rng.pt"], True),
        ("0.19.2", [".metadata"], True),
    ],
)
def test_a_later_megatrons_checkpoint_is_refused(tmp_path: Path, monkeypatch, version, files, taken) -> None:
    monkeypatch.setattr(checkpoints, "found_version", lambda: version)
    (checkpoint(tmp_path, "iter_0000007") / TRACKER).write_text("7")
    for name in files:
        (tmp_path / "iter_0000007" / name).touch()
    check_trackers(arguments(save=tmp_path))
    for flag in ("load", "pretrained_checkpoint"):
        with nullcontext() if taken else pytest.raises(ConfigError, match=f"Megatron {version} can read, .*0000007"):
            check_trackers(arguments(**{flag: tmp_path}))


@pytest.mark.parametrize("name", ["iter_0000007", "release", "non_persistent/iter_0000007"])
def test_complete_checkpoints_without_a_tracker_are_not_written_over(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    for flags in ({"save": tmp_path}, {"load": tmp_path}):
        with pytest.raises(ConfigError, match="would begin anew and write over them") as caught:
            check_trackers(arguments(**flags))
        assert f"echo {name[-1] if 'iter' in name else 'release'} > " in str(caught.value.hint)


def test_a_first_start_and_one_after_a_save_that_was_killed_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "iter_0000007" / "__0_0.distcp").touch()
    check_trackers(arguments(load=tmp_path, save=tmp_path))
    check_trackers(arguments(load=tmp_path / "none", save=tmp_path / "none"))


def test_a_checkpoint_that_has_to_be_there_has_a_tracker_unless_a_step_is_named(tmp_path: Path) -> None:
    wanting = arguments(load=tmp_path)
    wanting.exit_on_missing_checkpoint = True
    with pytest.raises(ConfigError, match=f"found no {TRACKER} in {tmp_path}"):
        check_trackers(wanting)
    checkpoint(tmp_path, "iter_0000007")
    check_trackers(arguments(load=tmp_path, ckpt_step=7))
    with pytest.raises(ConfigError, match=r"expected a checkpoint of --ckpt-step 5 in .*, found 7\n"):
        check_trackers(arguments(load=tmp_path, ckpt_step=5))
    (tmp_path / TRACKER).write_text("7")
    check_trackers(wanting)
