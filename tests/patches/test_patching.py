"""What a checkout's files are, patching them, merging with changes, and the way back, byte for byte."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe import checkout_hooks
from megatron_dynapipe.checkout.survey import State, load_all, survey
from megatron_dynapipe.cli import main
from megatron_dynapipe.core.errors import PatchError
from megatron_dynapipe.tools import patch as patching
from megatron_dynapipe.tools.patch import change
from tests.helpers.megatron_wheels import VERSIONS, unpack

ROOT = Path(__file__).parents[2]
SERIES = load_all()
MAX_ADDED_LINES = 60
ARGUMENTS, TRAINING = FILES = ("megatron/training/arguments.py", "megatron/training/training.py")
PACKAGE_INFO = "megatron/core/package_info.py"
GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")
BESIDE_A_HUNK = ("from megatron.training.config import FaultInjectorConfig\n", "import ours\n")
IN_A_HUNK = ("import build_pretraining_data_loader\n", "import build_pretraining_data_loader\nimport ours\n")
FAR_FROM_HUNKS = ('"""Pretrain utilities."""', '"""Ours."""')


@pytest.fixture(params=[VERSIONS[0], *(pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS[1:-1]), VERSIONS[-1]])
def checkout(request, tmp_path) -> Path:
    """What patches touch, and what tells the version, of a wheel: the oldest and the newest, in the slow suite all."""
    return unpack(request.param, tmp_path / "tree", [*FILES, PACKAGE_INFO])


@pytest.fixture
def tree(tmp_path) -> Path:
    """The same of the newest one."""
    return unpack(VERSIONS[-1], tmp_path / "tree", [*FILES, PACKAGE_INFO])


def with_history(folder: Path) -> Path:
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "as released"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "megatron").rglob("*") if p.is_file()}


def edit(folder: Path, old: str, new: str, name: str = TRAINING) -> dict[str, bytes]:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    return files(folder)


def state(folder: Path) -> State:
    return survey(folder)[0].state


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main.main(["patch", *map(str, words)])
    return code, *capsys.readouterr()


# The patches.


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.version)
def test_patches_are_small_say_why_and_call_the_public_hooks_alone(series):
    assert [patch.path.name[:4] for patch in series.patches] == [f"{n:04}" for n in range(1, len(series.patches) + 1)]
    assert set(series.files) == {patch.file for patch in series.patches} == set(FILES)
    for patch in series.patches:
        header, _, body = patch.path.read_text().partition("\ndiff --git")
        assert "\nWhy: " in header and "\nUpstream: " in header and "can go when" in header
        assert len(patch.added) < MAX_ADDED_LINES and not re.search(r"^-(?!-- )", body, re.MULTILINE)
        assert set(re.findall(r"dynapipe\.(\w+)\(", "\n".join(patch.added))) <= set(checkout_hooks.__all__)
        imports = {line.strip() for line in patch.added if "import" in line}
        assert imports <= {"from megatron_dynapipe import checkout_hooks as dynapipe"}


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.version)
def test_patches_name_the_contents_between_them(series):
    """By these names three-way merges, and `git am -3`, find what a patch was made from."""
    for name, contents in series.files.items():
        texts = [patch.path.read_text() for patch in series.patches if patch.file == name]
        pairs = [re.search(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", text, re.MULTILINE).groups() for text in texts]
        assert [before for before, _ in pairs[1:]] == [after for _, after in pairs[:-1]]
        assert any(
            content.released.startswith(pairs[0][0]) and content.patched.startswith(pairs[-1][1])
            for content in contents
        )


def test_a_wheel_holds_the_patches(tmp_path):
    """What setup.py copies into one, without building the native core."""
    (tmp_path / "egg").mkdir()
    words = ["-q", "egg_info", "--egg-base", str(tmp_path / "egg"), "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run([sys.executable, "setup.py", *words], cwd=ROOT, check=True, capture_output=True, timeout=200)
    packed = load_all(tmp_path / "lib" / "megatron_dynapipe" / "patches")
    assert [(s.version, len(s.patches)) for s in packed] == [(s.version, len(s.patches)) for s in SERIES]


def test_every_series_has_a_row_in_the_readme_and_every_wheel_a_series():
    readme = (ROOT / "megatron_dynapipe" / "patches" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(core_v[\w.]+)` \| ([^|]*) \|", readme, re.MULTILINE))
    assert rows == {series.version: ", ".join(series.releases) for series in SERIES}
    assert set(VERSIONS) <= {name for series in SERIES for name in series.releases}


def test_a_package_without_patches_is_named(tmp_path):
    with pytest.raises(PatchError, match="no patches in"):
        load_all(tmp_path)


# Files as released.


@pytest.mark.parametrize("is_git", [True, False], ids=["git", "plain"])
def test_the_command_checks_applies_and_reverses(is_git, checkout, capsys):
    if is_git:
        with_history(checkout)
    before = files(checkout)
    rows = [
        ("--check", "none", "as released", "not patched; nothing was changed"),
        ("", "applied", "as released", "applied; to go back: --reverse"),
        ("", "none", "patched", "patched already"),
        ("--check", "none", "patched", "patched already"),
        ("--reverse", "reversed", "patched", "reversed: the patches are out"),
        ("--reverse", "none", "as released", "not patched; nothing was changed"),
    ]
    for flag, action, was, said in rows:
        code, output, _ = run(capsys, checkout, "--json", *flag.split())
        result = json.loads(output)
        assert (code, result["action"], result["found"], result["error"]) == (0, action, was, None)
        assert result["format"] == "dynapipe-patch/2" and len(result["patches"]) == 2
        if action == "applied":
            assert files(checkout).keys() == before.keys()  # no .orig, no .rej
            assert {name for name, data in files(checkout).items() if data != before[name]} == set(FILES)
        if action != "none":  # once more, for the text
            change(checkout, reverse=action == "applied")
        assert run(capsys, checkout, *flag.split())[1].endswith(f"{said}\n")
    assert files(checkout) == before


def test_git_am_takes_the_series(checkout):
    with_history(checkout)
    paths = [str(patch.path.resolve()) for patch in survey(checkout)[0].series.patches]
    subprocess.run([*GIT, "am", "-q", *paths], cwd=checkout, check=True)
    assert state(checkout) is State.PATCHED


def test_what_a_checkout_says_of_itself_does_not_matter(checkout):
    series = survey(checkout)[0].series
    (checkout / PACKAGE_INFO).write_text("MAJOR = 7\nMINOR = 1\nPATCH = 0\n")
    (checked,) = survey(checkout)
    assert (checked.state, checked.series) == (State.RELEASED, series)


def test_settings_of_git_do_not_change_what_is_written(tree, tmp_path, monkeypatch):
    """A user's global settings may make git write other line ends, or ignore files."""
    (tmp_path / ".gitconfig").write_text("[core]\nautocrlf = true\n[apply]\nwhitespace = fix\n")
    (tmp_path / "git").mkdir()
    (tmp_path / "git" / "ignore").write_text("*.py\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    change(tree)
    assert state(tree) is State.PATCHED


# Refusals: nothing is changed.


def test_a_modified_file_is_named_with_the_failing_hunk(checkout, capsys):
    before = edit(checkout, "    # Data stuff.\n", "    # Our own data.\n")
    code, _, said = run(capsys, checkout)
    assert code == 2 and f"found modified: {TRAINING}; 0002-Take-planned-iterations-in-place-of-datasets.patch:" in said
    assert re.search(r"training\.py:\d+", said)
    assert files(checkout) == before


def test_check_says_the_state_of_each_file(checkout, capsys):
    (checkout / TRAINING).write_text((checkout / TRAINING).read_text() + "\n# a line of our own\n")
    code, output, said = run(capsys, checkout, "--check")
    assert code == 1 and said.endswith("or set these aside (git stash), patch, and put them back\n")
    assert re.search(rf"^  {ARGUMENTS}: as released \(0[\d., ]*\)$", output, re.M)
    (checkout / ARGUMENTS).unlink()
    code, output, said = run(capsys, checkout, "--check")
    assert code == 1 and "hint: check out the whole of Megatron-LM" in said
    assert f"  {ARGUMENTS}: missing\n" in output and f"  {TRAINING}: modified\n" in output
    code, output, _ = run(capsys, checkout, "--check", "--json")
    states = {file["name"]: file["state"] for file in json.loads(output)["files"]}
    assert code == 1 and states == {ARGUMENTS: "missing", TRAINING: "modified"}


def test_an_unknown_version_is_refused_with_the_known_ones(tree):
    for name in FILES:
        (tree / name).write_text("# another version\n")
    (tree / PACKAGE_INFO).write_text("MAJOR = 0\nMINOR = 12\nPATCH = 0\n")
    with pytest.raises(PatchError, match=r"releases 0.18.0, 0.18.1, .*, found one that says 0.12.0") as told:
        change(tree)
    assert "first on PYTHONPATH and use this project's entry scripts" in told.value.hint


@pytest.mark.parametrize("line", ["    dynapipe.end()\n", "    dynapipe.finish()\n    dynapipe.schedule(None)\n"])
@pytest.mark.parametrize("flag", ["", "--merge", "--reverse"])
def test_lines_of_other_patches_are_refused(flag, line, tree, capsys):
    """As a series of another version of this project leaves them, or a merge by hand that was not ended."""
    change(tree)
    before = edit(tree, "    dynapipe.finish()\n", line)
    code, _, said = run(capsys, tree, *flag.split())
    assert code == 2 and f"found patched in part: {TRAINING}\nhint: take DynaPipe's lines out" in said
    assert files(tree) == before


@pytest.mark.parametrize("flags", [[], ["--check", "--json"], ["--check"]], ids=" ".join)
def test_a_folder_that_is_no_checkout(flags, tmp_path, capsys):
    code, output, said = run(capsys, tmp_path, *flags)
    assert code == (1 if flags else 2)
    assert "found no folder megatron/" in output + said and "give the folder" in output + said


def test_a_missing_git_is_named(tree, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PatchError, match="the program git is needed here"):
        change(tree)


def test_a_failed_write_leaves_all_files_as_they_were(tree, monkeypatch, capsys):
    before, replace, calls = files(tree), patching.replace_bytes, []

    def fail_once(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(path))
        replace(path, data)

    monkeypatch.setattr(patching, "replace_bytes", fail_once)
    code, _, said = run(capsys, tree)
    assert code == 2 and f"{TRAINING}: No space left on device" in said
    assert files(tree) == before


# Merging.


@pytest.mark.parametrize(
    ("change_of_ours", "is_git"), [(BESIDE_A_HUNK, True), (FAR_FROM_HUNKS, True), (FAR_FROM_HUNKS, False)]
)
def test_a_merge_keeps_changes_and_is_reversed_exactly(change_of_ours, is_git, tree, capsys):
    """The first change is part of a hunk's context: no patch applies, a three-way merge does."""
    if is_git:
        with_history(tree)
    before = edit(tree, *change_of_ours)
    assert run(capsys, tree)[0] == 2 and files(tree) == before
    assert run(capsys, tree, "--merge")[1].endswith("merged; to go back: --reverse\n")
    text = (tree / TRAINING).read_text()
    assert change_of_ours[1] in text and "dynapipe.dataset_provider(" in text
    assert state(tree) is State.MERGED
    if is_git:
        status = subprocess.run(["git", "status", "--short"], cwd=tree, check=True, capture_output=True, text=True)
        assert {line.split()[1] for line in status.stdout.splitlines()} == set(FILES)
    assert run(capsys, tree, "--merge")[1].endswith("patched already, and you have changed it, too\n")
    assert run(capsys, tree, "--reverse")[1].endswith("reversed: the patches are out, your changes are in\n")
    assert files(tree) == before


@pytest.mark.parametrize("is_git", [True, False], ids=["git", "plain"])
def test_a_conflict_is_all_that_is_said_and_nothing_is_changed(is_git, tree, capsys):
    if is_git:
        with_history(tree)
    before = edit(tree, *IN_A_HUNK)
    code, output, said = run(capsys, tree, "--merge")
    assert (code, output) == (2, "") and said.startswith("error: 0002-Take-planned-iterations-in-place")
    assert (f"your changes of {TRAINING} conflict with it" if is_git else f"patch failed: {TRAINING}:") in said
    assert "git fetch --unshallow --tags" in said
    assert files(tree) == before


def test_a_change_that_could_not_be_told_from_the_patches_is_refused(tree):
    """Taken out again, the patches would take the user's own line with them."""
    end = "    one_logger_utils.finish()\n\n\ndef update_train_iters"
    before = edit(with_history(tree), end, end.replace("\n\n", "\n    dynapipe.finish()\n\n", 1))
    with pytest.raises(PatchError, match="the way back would not give the same bytes; nothing was changed"):
        change(tree, merge=True)
    assert files(tree) == before


def test_a_release_between_two_known_ones_is_merged_with_the_series_that_fits(tmp_path):
    """Nothing of it is known: each series is tried, the newest first."""
    tree = unpack(VERSIONS[0], tmp_path, [*FILES, PACKAGE_INFO])
    for name in FILES:
        (tree / name).write_text((tree / name).read_text() + "\n# a later day\n")
    before = files(tree)
    change(tree, merge=True)
    assert state(tree) is State.MERGED
    change(tree, reverse=True)
    assert files(tree) == before


def test_a_missing_file_is_not_merged(tree):
    (tree / TRAINING).unlink()
    with pytest.raises(PatchError, match=f"found missing: {TRAINING}"):
        change(tree, merge=True)


def test_reversing_keeps_a_line_that_was_added_to_a_patched_file(checkout):
    before = files(checkout)
    change(checkout)
    (checkout / TRAINING).write_text((checkout / TRAINING).read_text() + "\n# a line of our own\n")
    change(checkout, reverse=True)
    assert files(checkout) == before | {TRAINING: before[TRAINING] + b"\n# a line of our own\n"}


# Killed, linked.

KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_dynapipe.tools import patch as patching

def replace(path, data, left=[int(sys.argv[2])], real=patching.replace_bytes):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(path, data)

patching.replace_bytes = replace
patching.change(Path(sys.argv[1]), merge=True, reverse=len(sys.argv) > 3)
"""


def kill(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), *words], check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("written", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_merge_that_was_killed_is_repeated_and_reversed(written, tree, capsys):
    """The user's own bytes come back, after a kill at any file and however often it is repeated."""
    before = edit(with_history(tree), *BESIDE_A_HUNK)
    kill(tree, written)
    assert main.main(["patch", str(tree), "--reverse"]) == 0
    assert files(tree) == before
    kill(tree, written)
    assert main.main(["patch", str(tree), "--merge"]) == 0
    assert state(tree) is State.MERGED
    kill(tree, written, "reverse")
    assert main.main(["patch", str(tree), "--reverse"]) == 0
    assert files(tree) == before


def test_a_tree_that_is_patched_in_part_is_patched_to_its_end(tree, capsys):
    arguments = (tree / ARGUMENTS).read_bytes()
    change(tree)
    done = files(tree)
    (tree / ARGUMENTS).write_bytes(arguments)
    code, output, _ = run(capsys, tree, "--check")
    assert code == 0 and "patched in part: `megatron-dynapipe patch` patches the rest" in output
    change(tree)
    assert files(tree) == done


def test_links_and_modes_stay(tree, tmp_path):
    """A checkout may share files with another by links."""
    target = tmp_path / "shared.py"
    (tree / TRAINING).rename(target)
    (tree / TRAINING).symlink_to(target)
    target.chmod(0o640)
    before = files(tree)
    for reverse in (False, True):
        change(tree, reverse=reverse)
        assert (tree / TRAINING).readlink() == target
        assert target.stat().st_mode & 0o777 == 0o640
    assert files(tree) == before
