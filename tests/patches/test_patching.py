"""Recognising checkouts, applying all or nothing, taking back byte for byte; the command."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe import checkout_hooks, patching
from megatron_dynapipe.cli import main
from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.patching import State, applying, examine, load_all, survey
from megatron_dynapipe.patching.series import digest
from tests.helpers.megatron_wheels import VERSIONS, unpack

ROOT = Path(__file__).parents[2]
SERIES = load_all()
CURRENT = [series for series in SERIES if series.is_current]
MAX_CHANGED_LINES = 60
TRAINING = "megatron/training/training.py"


@pytest.fixture(scope="module", params=VERSIONS)
def released(request, tmp_path_factory) -> Path:
    return unpack(request.param, tmp_path_factory.mktemp("released"))


@pytest.fixture
def tree(released, tmp_path) -> Path:
    """What patches touch, and what tells the version, of a released checkout."""
    series = next(series for series in CURRENT if _is_released(released, series))
    for name in (*series.files, "megatron/core/package_info.py"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(released / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def _is_released(folder: Path, series: patching.Series) -> bool:
    return digest((folder / TRAINING).read_bytes()) in {each.before for each in series.files[TRAINING]}


def as_git(folder: Path) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "megatron").rglob("*") if p.is_file()}


@pytest.mark.parametrize("series", CURRENT, ids=lambda series: series.version)
def test_patches_are_small_and_say_why(series):
    assert [patch.path.name[:4] for patch in series.patches] == [f"{n:04}" for n in range(1, len(series.patches) + 1)]
    for patch in series.patches:
        header = patch.path.read_text().partition("\ndiff --git")[0]
        assert patch.added + patch.removed < MAX_CHANGED_LINES
        assert "\nWhy: " in header and "\nUpstream: " in header and "can go when" in header
        assert set(patch.files) <= set(series.files)


@pytest.mark.parametrize("series", CURRENT, ids=lambda series: series.version)
def test_patches_call_the_public_hooks_alone(series):
    for patch in series.patches:
        added = [line[1:] for line in patch.path.read_text().splitlines() if re.match(r"\+(?!\+\+ )", line)]
        assert {name for line in added for name in re.findall(r"dynapipe\.(\w+)\(", line)} <= set(
            checkout_hooks.__all__
        )
        for line in added:
            if "import" in line:
                assert line.strip() == "from megatron_dynapipe import checkout_hooks as dynapipe"


def test_a_wheel_holds_the_patches(tmp_path):
    """What setup.py copies into one, without building the native core."""
    (tmp_path / "egg").mkdir()
    words = ["-q", "egg_info", "--egg-base", str(tmp_path / "egg"), "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run([sys.executable, "setup.py", *words], cwd=ROOT, check=True, capture_output=True, timeout=200)
    packed = load_all(tmp_path / "lib" / "megatron_dynapipe" / "patches")
    assert [(s.version, s.is_current, len(s.patches)) for s in packed] == [
        (s.version, s.is_current, len(s.patches)) for s in SERIES
    ]


def test_every_version_has_a_row_in_the_readme():
    readme = (ROOT / "megatron_dynapipe" / "patches" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(core_v[\w.]+)` \| ([^|]*) \|", readme, re.MULTILINE))
    assert rows == {series.version: ", ".join(series.releases) for series in CURRENT}


def test_the_wheels_of_continuous_integration_are_known_releases():
    assert set(VERSIONS) <= {name for series in CURRENT for name in series.releases}


@pytest.mark.parametrize("series", CURRENT, ids=lambda series: series.version)
def test_blobs_are_what_the_patches_say_they_change(series):
    """The index line of the first patch of a file has git's short name of one of its released contents."""
    for name, contents in series.files.items():
        first = next(patch for patch in series.patches if name in patch.files)
        short = re.search(r"^index ([0-9a-f]+)\.\.", first.path.read_text(), re.MULTILINE)[1]
        assert any(each.blob.startswith(short) for each in contents)


@pytest.mark.parametrize("is_git", [True, False], ids=["git", "patch"])
def test_applying_and_reversing_restores_every_byte(is_git, tree):
    if is_git:
        as_git(tree)
    before = files(tree)
    found = examine(tree, SERIES)
    assert found.state is State.RELEASED
    assert found.tool == ("git" if is_git else "patch")
    found.apply()
    assert files(tree) != before
    assert files(tree).keys() == before.keys()  # no .orig, no .rej
    patched = examine(tree, SERIES)
    assert patched.state is State.PATCHED and patched.series == found.series
    patched.reverse()
    assert files(tree) == before


@pytest.mark.parametrize("is_git", [True, False], ids=["git", "patch"])
def test_what_an_earlier_release_patched_is_patched_anew_or_reversed(is_git, tree):
    if is_git:
        as_git(tree)
    before = files(tree)
    examine(tree, SERIES).apply()
    today = files(tree)
    examine(tree, SERIES).reverse()
    found = examine(tree, SERIES)
    version = found.series.version
    (earlier,) = (s for s in SERIES if not s.is_current and s.version == version)
    if found.found.says not in earlier.releases:
        pytest.skip("the earlier release did not know this one")
    for patch in earlier.patches:
        subprocess.run(["patch", "-p1", "--batch", "-s", "--input", str(patch.path)], cwd=tree, check=True)
    outdated = files(tree)
    assert outdated not in (before, today)
    assert main.main(["patch", str(tree), "--check"]) == 0
    found = examine(tree, SERIES)
    assert found.state is State.OUTDATED and files(tree) == outdated
    found.apply()
    assert files(tree) == today
    for name, data in outdated.items():
        (tree / name).write_bytes(data)
    assert main.main(["patch", str(tree), "--reverse"]) == 0
    assert files(tree) == before


def test_git_am_takes_the_series(tree):
    series = examine(tree, SERIES).series
    as_git(tree)
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "base"], cwd=tree, check=True)
    paths = [str(patch.path) for patch in series.patches]
    subprocess.run(["git", *identity, "am", "-q", *paths], cwd=tree, check=True)
    assert examine(tree, SERIES).state is State.PATCHED


def test_a_modified_file_is_named_with_the_failing_hunk(tree):
    path = tree / TRAINING
    path.write_text(path.read_text().replace("    # Data stuff.\n", "    # Our own data.\n"))
    before = files(tree)
    with pytest.raises(PatchError) as told:
        examine(tree, SERIES)
    assert f"found modified: {TRAINING}" in told.value.message
    assert "0002-Take-planned-iterations-in-place-of-datasets.patch: " in told.value.message
    assert re.search(r"training\.py:\d+", told.value.message)
    assert files(tree) == before


def test_a_file_modified_elsewhere_is_named(tree):
    (tree / TRAINING).write_text((tree / TRAINING).read_text() + "\n# a line of our own\n")
    with pytest.raises(PatchError, match=r"found modified: megatron/training/training.py; every hunk applies"):
        examine(tree, SERIES)


def test_a_half_patched_tree_is_refused(tree):
    found = examine(tree, SERIES)
    arguments = (tree / "megatron/training/arguments.py").read_bytes()
    found.apply()
    (tree / "megatron/training/arguments.py").write_bytes(arguments)
    with pytest.raises(PatchError, match=r"patched, found as released: megatron/training/arguments.py") as told:
        examine(tree, SERIES)
    assert "git checkout -- FILE" in told.value.hint


def test_an_edited_file_of_a_patched_tree_is_the_only_one_named(tree, capsys):
    examine(tree, SERIES).apply()
    (tree / TRAINING).write_text((tree / TRAINING).read_text() + "\n# a line of our own\n")
    assert main.main(["patch", str(tree), "--reverse"]) == 2
    said = capsys.readouterr().err
    assert f"patched, found modified: {TRAINING}\n" in said
    assert "arguments.py" not in said and "utils.py" not in said
    assert "--reverse --merge takes out the patches alone" in said


@pytest.mark.parametrize("is_git", [True, False], ids=["git", "patch"])
def test_reversing_by_merging_keeps_our_own_line(is_git, tree):
    if is_git:
        as_git(tree)
    before = files(tree)
    examine(tree, SERIES).apply()
    (tree / TRAINING).write_text((tree / TRAINING).read_text() + "\n# a line of our own\n")
    assert main.main(["patch", str(tree), "--reverse", "--merge"]) == 0
    assert files(tree) == before | {TRAINING: before[TRAINING] + b"\n# a line of our own\n"}


def test_an_unknown_version_is_refused_with_the_known_ones(tree):
    for name in examine(tree, SERIES).series.files:
        (tree / name).write_text("# another version\n")
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 0\n")
    with pytest.raises(PatchError, match=r"releases 0.18.0, 0.18.1, .*, found one that says 0.12.0") as told:
        examine(tree, SERIES)
    assert "first on PYTHONPATH and use this project's entry scripts" in told.value.hint


def test_what_a_checkout_says_of_itself_does_not_matter(tree):
    found = examine(tree, SERIES)
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 7\nMINOR = 1\nPATCH = 0\n")
    again = examine(tree, SERIES)
    assert (again.state, again.series) == (State.RELEASED, found.series)


def test_check_says_the_state_of_each_file(tree, capsys):
    (tree / TRAINING).write_text((tree / TRAINING).read_text() + "\n# a line of our own\n")
    (tree / "megatron/core/utils.py").unlink()
    assert main.main(["patch", str(tree), "--check"]) == 1
    said = capsys.readouterr()
    version = survey(tree, SERIES).says
    assert "  megatron/core/utils.py: missing\n" in said.out
    assert f"  {TRAINING}: modified\n" in said.out
    assert re.search(rf"^  megatron/training/arguments.py: as released \(.*{re.escape(version)}.*\)$", said.out, re.M)
    assert "hint: check out the whole of Megatron-LM" in said.err
    assert main.main(["patch", str(tree), "--check", "--json"]) == 1
    states = {file["name"]: file["state"] for file in json.loads(capsys.readouterr().out)["files"]}
    assert states == {
        "megatron/core/utils.py": "missing",
        "megatron/training/arguments.py": "as released",
        TRAINING: "modified",
    }


def test_a_folder_that_is_no_checkout(tmp_path):
    with pytest.raises(PatchError, match=r"found no folder megatron/ there"):
        examine(tmp_path, SERIES)


def test_a_failure_while_files_are_exchanged_leaves_all_as_they_were(tree, monkeypatch):
    before, replace = files(tree), applying._replace
    calls = []

    def fail_once(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError("no space left on device")
        replace(path, data)

    monkeypatch.setattr(applying, "_replace", fail_once)
    with pytest.raises(OSError, match="no space"):
        examine(tree, SERIES).apply()
    assert files(tree) == before


def test_a_missing_tool_is_named(tree, monkeypatch):
    found = examine(tree, SERIES)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PatchError, match="the program patch is needed here"):
        found.apply()


def test_folders_without_patches_are_refused(tmp_path):
    with pytest.raises(PatchError, match="no patches in"):
        load_all(tmp_path)
    (tmp_path / "core_v1").mkdir()
    (tmp_path / "core_v1" / "digests.json").write_text("{}x")
    with pytest.raises(PatchError, match="cannot read the digests"):
        load_all(tmp_path)


# The command.


def told(capsys, *words: str) -> tuple[int, dict]:
    code = main.main(["patch", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_checks_applies_and_reverses(tree, capsys):
    before = files(tree)
    steps = [
        ("--check", "none", "as released"),
        (None, "applied", "as released"),
        (None, "none", "patched"),
        ("--check", "none", "patched"),
        ("--reverse", "reversed", "patched"),
        ("--reverse", "none", "as released"),
    ]
    for flag, action, found in steps:
        code, result = told(capsys, str(tree), *([flag] if flag else []))
        assert (code, result["action"], result["found"], result["error"]) == (0, action, found, None)
        assert result["format"] == "dynapipe-patch/2" and len(result["patches"]) == 6
    assert files(tree) == before


def test_the_command_says_that_a_tree_is_patched_already(tree, capsys):
    assert main.main(["patch", str(tree)]) == 0
    assert capsys.readouterr().out.endswith("applied; to go back: --reverse\n")
    assert main.main(["patch", str(tree)]) == 0
    assert capsys.readouterr().out.endswith("patched already\n")


def test_the_command_refuses_with_a_hint(tmp_path, capsys):
    assert main.main(["patch", str(tmp_path)]) == 2
    assert "hint: give the folder" in capsys.readouterr().err
    code, result = told(capsys, str(tmp_path), "--check")
    assert code == 1 and "found no folder megatron/" in result["error"]
    assert main.main(["patch", str(tmp_path), "--check"]) == 1
    assert "found no folder megatron/" in capsys.readouterr().err
