"""Merging patches with changes: three-way in git, by context elsewhere; tried, kept or taken back."""

import subprocess
from pathlib import Path

import pytest

from megatron_dynapipe.cli import main, smoke_test
from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.patching import State, examine, load_all, merge, survey
from tests.helpers.megatron_wheels import VERSIONS, unpack

SERIES = load_all()
FILES = ("megatron/core/utils.py", "megatron/training/arguments.py", "megatron/training/training.py")
TRAINING = FILES[-1]
SCRIPT = Path(__file__).with_name("pretrain_gpt_by_hand.py")
GIT = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")


@pytest.fixture(scope="module")
def newest(tmp_path_factory) -> Path:
    return unpack(VERSIONS[-1], tmp_path_factory.mktemp("released"))


@pytest.fixture
def plain(newest, tmp_path) -> Path:
    """What patches touch, outside git."""
    for name in (*FILES, "megatron/core/package_info.py"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((newest / name).read_bytes())
    return tmp_path / "tree"


@pytest.fixture
def tree(plain) -> Path:
    """The same with a history."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "as released"]):
        subprocess.run([*GIT, *command], cwd=plain, check=True)
    return plain


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def edit(folder: Path, old: str, new: str, name: str = TRAINING) -> dict[str, bytes]:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    return contents(folder)


def test_a_change_beside_a_hunk_needs_three_ways(tree):
    """The line above the provider's call is part of the patch's context: no hunk applies, the merge does."""
    before = edit(tree, "from megatron.training.config import FaultInjectorConfig\n", "import ours\n")
    assert "patch failed" in _refused(tree).message
    tried = []
    merge(survey(tree, SERIES), tried.append)
    assert tried == [tree]
    text = (tree / TRAINING).read_text()
    assert "import ours\n" in text and "dynapipe.dataset_provider(" in text
    found = examine(tree, SERIES)
    assert found.state is State.MERGED and found.found.record.is_tried
    status = subprocess.run(["git", "status", "--short"], cwd=tree, check=True, capture_output=True, text=True).stdout
    assert {line.split()[1] for line in status.splitlines()} == set(FILES)  # git does not see the originals
    found.reverse()
    assert contents(tree) == before
    assert not (tree / ".megatron-dynapipe").exists()


def _refused(folder: Path) -> PatchError:
    with pytest.raises(PatchError) as told:
        examine(folder, SERIES)
    return told.value


def test_outside_git_hunks_find_their_context(plain):
    before = edit(plain, '"""Pretrain utilities."""', '"""Ours."""')
    merge(survey(plain, SERIES), lambda folder: None)
    assert examine(plain, SERIES).state is State.MERGED
    examine(plain, SERIES).reverse()
    assert contents(plain) == before


def test_outside_git_a_change_beside_a_hunk_is_refused(plain):
    before = edit(plain, "from megatron.training.config import FaultInjectorConfig\n", "import ours\n")
    with pytest.raises(PatchError, match="nothing was changed") as told:
        merge(survey(plain, SERIES), pytest.fail)
    assert "needs a git checkout with the released file" in told.value.hint
    assert contents(plain) == before


def test_a_conflict_is_named_and_nothing_is_changed(tree):
    line = "from megatron.training.datasets.data_samplers import build_pretraining_data_loader\n"
    before = edit(tree, line, line + "import ours\n")
    with pytest.raises(PatchError, match=r"training.py: your changes and the patches conflict at line \d+") as told:
        merge(survey(tree, SERIES), pytest.fail)
    assert "git am -3" in told.value.hint
    assert contents(tree) == before and not (tree / ".megatron-dynapipe").exists()


def test_a_trial_that_fails_puts_the_files_back(tree):
    before = edit(tree, '"""Pretrain utilities."""', '"""Ours."""')

    def fail(folder: Path) -> None:
        assert contents(folder) != before
        raise PatchError("it does not train")

    with pytest.raises(PatchError, match="it does not train"):
        merge(survey(tree, SERIES), fail)
    assert contents(tree) == before and not (tree / ".megatron-dynapipe").exists()


def test_a_merge_that_was_killed_is_said_and_reversed(tree, monkeypatch, capsys):
    before = edit(tree, '"""Pretrain utilities."""', '"""Ours."""')
    monkeypatch.setattr("megatron_dynapipe.patching.merging.MergeRecord.remove", lambda folder: None)
    monkeypatch.setattr(
        "megatron_dynapipe.patching.merging.exchange", _only_once(__import__("megatron_dynapipe.patching.applying"))
    )
    with pytest.raises(KeyboardInterrupt):
        merge(survey(tree, SERIES), _killed)
    assert main.main(["patch", str(tree), "--check"]) == 0
    assert "an earlier --merge did not end" in capsys.readouterr().out
    examine(tree, SERIES).reverse()
    assert contents(tree) == before


def _only_once(package):
    """The real exchange the first time; then, as in a killed process, nothing."""
    real, calls = package.patching.applying.exchange, []

    def exchange(folder, changed):
        calls.append(folder)
        if len(calls) == 1:
            real(folder, changed)

    return exchange


def _killed(folder: Path) -> None:
    raise KeyboardInterrupt


def test_a_missing_file_is_not_merged(tree):
    (tree / TRAINING).unlink()
    with pytest.raises(PatchError, match=f"found missing or patched before: {TRAINING}"):
        merge(survey(tree, SERIES), pytest.fail)


def test_a_damaged_record_is_one_error(tree):
    (tree / ".megatron-dynapipe").mkdir()
    (tree / ".megatron-dynapipe" / "merged.json").write_text("[")
    with pytest.raises(PatchError, match="cannot read"):
        survey(tree, SERIES)


def test_the_trial_needs_a_script(tmp_path):
    with pytest.raises(PatchError, match=r"expected pretrain_gpt.py in .* found none"):
        smoke_test.train_two_ranks(tmp_path)


@pytest.mark.slow
def test_the_command_merges_and_trains_two_ranks(newest, tmp_path, monkeypatch, capsys):
    """As a user does: a checkout with changes of its own, and its script; then one whose change breaks training."""
    tree = unpack(VERSIONS[-1], tmp_path / "tree")
    (tree / "pretrain_gpt.py").write_bytes(SCRIPT.read_bytes())
    monkeypatch.setenv("LOSSES", str(tmp_path / "losses.json"))
    monkeypatch.setattr(smoke_test, "TIMEOUT_S", 280)
    before = edit(tree, '"""Pretrain utilities."""', '"""Ours."""')
    assert main.main(["patch", str(tree), "--merge"]) == 0
    assert "merged, and two ranks train; to go back: --reverse" in capsys.readouterr().out
    assert main.main(["patch", str(tree), "--reverse"]) == 0
    assert contents(tree) == before
    broken = edit(tree, '"""Ours."""', 'raise RuntimeError("our own defect")')
    assert main.main(["patch", str(tree), "--merge"]) == 2
    assert "ended with status 1; its files are as they were" in capsys.readouterr().err
    assert contents(tree) == broken
