"""Every command's output: files of the user's are refused and stay, its own are replaced, links stay links.

What is written into a dataset's folder, and into a checkout, is held by tests/tools/prepare and tests/patches.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dynapipe import outputs
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.store import codec
from tests.helpers.plans import make_plan
from tests.helpers.runs import write_run
from tests.tools.prepare.test_run import text_samples

MODEL = ("--model", "gpt", "--layers", "2", "--hidden-size", "32", "--recompute", "none")


@dataclass(frozen=True)
class Inputs:
    """What the commands read."""

    folder: Path
    costs: Path
    batches: Path
    plan: Path
    run: Path
    text: Path

    @property
    def planning(self) -> tuple[str, ...]:
        """Arguments of the commands that plan."""
        files = ("--batches", str(self.batches), "--cost-model", str(self.costs), "--device-memory-mb", "9000")
        return (*files, *MODEL, "--limit", "1", "--max-seq-len", "300", "--search-evaluations", "20")


@dataclass(frozen=True)
class Output:
    """A file that a command writes: its suffix, and the command's arguments, given the inputs and the file."""

    suffix: str
    command: Callable[[Inputs, Path], list[str]]

    def run(self, inputs: Inputs, path: Path) -> int:
        """The command's exit status."""
        return main(self.command(inputs, path))


def tune(inputs: Inputs, path: Path) -> list[str]:
    return ["tune", *inputs.planning, "--devices", "1", "--workers", "1", "--write-config", str(path)]


OUTPUTS = {
    "plan": Output(".plan", lambda inputs, path: ["plan", *inputs.planning, "--output", str(path.parent)]),
    "tune": Output(".yaml", tune),
    "show picture": Output(".png", lambda inputs, path: ["show", str(inputs.plan), "--picture", str(path)]),
    "show drawing": Output(".svg", lambda inputs, path: ["show", str(inputs.plan), "--picture", str(path)]),
    "show trace": Output(".json", lambda inputs, path: ["show", str(inputs.plan), "--trace", str(path)]),
    "report": Output(".html", lambda inputs, path: ["report", str(inputs.run), "--output", str(path)]),
}
"""One row for each file that a command writes; `profile` has its own test, since it takes a device."""

FOLDERS = {
    "data prepare": lambda inputs, path: ["data", "prepare", str(inputs.text), "--output", str(path)],
    "data demo": lambda inputs, path: ["data", "demo", "--output", str(path)],
    "convert from-hf": lambda inputs, path: ["convert", "from-hf", str(inputs.folder), str(path)],
    "convert to-hf": lambda inputs, path: ["convert", "to-hf", str(inputs.folder), str(path)],
}
"""Commands that write a folder."""

STRANGERS = {
    "notes": b"my own notes",
    "of a run": b"dynapipe-data: .demo/data\ntrain-iters: 30\n",
    "a page": b"<!doctype html><title>About dynapipe</title>",
    "lengths": b'{"format": "dynapipe-batches/1", "batches": []}',
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(64),
}
"""Files of a user's, some of which speak of this program."""

walk = pytest.mark.parametrize("output", [pytest.param(each, id=name) for name, each in OUTPUTS.items()])


@pytest.fixture
def inputs(tmp_path: Path, cost_file: Path, batches_file: Path) -> Inputs:
    plan = tmp_path / "of-a-plan"
    plan.write_bytes(codec.encode(make_plan((2, 1), 2)))
    text = tmp_path / "text.jsonl"
    text.write_text('{"task": "sums", "input": "1 + 1", "target": "2"}\n')
    return Inputs(tmp_path, cost_file, batches_file, plan, write_run(tmp_path / "run", iterations=2), text)


@pytest.fixture
def path(output: Output, tmp_path: Path) -> Path:
    """Where the output goes; a plan's file is called as its batch."""
    folder = tmp_path / "made"
    folder.mkdir()
    return folder / f"b0{output.suffix}"


def refused(output: Output, inputs: Inputs, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line and the hint of a command that could not write, and that leaves nothing beside."""
    before = sorted(path.parent.iterdir())
    assert output.run(inputs, path) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and str(path) in said, said
    assert sorted(path.parent.iterdir()) == before
    return said


@walk
def test_own_files_are_replaced_and_links_stay(output: Output, inputs: Inputs, path: Path) -> None:
    assert output.run(inputs, path) == 0
    real = inputs.folder / f"elsewhere{output.suffix}"
    path.rename(real)
    path.symlink_to(real)
    before = real.stat().st_ino
    assert output.run(inputs, path) == 0
    assert path.is_symlink() and real.stat().st_ino != before
    assert list(path.parent.iterdir()) == [path]


@walk
def test_files_and_folders_of_the_user_stay(output, inputs, path, capsys):
    for content in STRANGERS.values():
        path.write_bytes(content)
        assert "a file that this program wrote, it is another" in refused(output, inputs, path, capsys)
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    (path / "precious").touch()
    assert "found a folder" in refused(output, inputs, path, capsys)
    assert list(path.iterdir()) == [path / "precious"]


@walk
def test_what_cannot_be_written_is_said_before_the_work(output, inputs, path, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # as for a user who is not root
    for name in ("core.planner.Planner", "report.records.read_records", "store.codec.decode_plan"):
        monkeypatch.setattr(f"megatron_dynapipe.{name}", None)  # what takes long
    assert "is read-only" in refused(output, inputs, path, capsys)


@walk
def test_a_full_device_is_one_line_and_leaves_the_old_file(output, inputs, path, capsys, monkeypatch):
    assert output.run(inputs, path) == 0
    before = path.read_bytes()
    capsys.readouterr()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outputs.os, "fsync", full)
    assert "No space left on device" in refused(output, inputs, path, capsys)
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [pytest.param(each, id=name) for name, each in FOLDERS.items()])
def test_folders_of_the_user_stay(command, inputs, tmp_path, capsys, monkeypatch):
    """Said before the work, of which these inputs would allow none."""
    path = tmp_path / "made"
    monkeypatch.setattr("megatron_dynapipe.tools.demo_data.stdlib_samples", text_samples)  # in place of seconds

    def refused(where: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(command(inputs, where)) == 2
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and "Traceback" not in said
        assert sorted(tmp_path.rglob("*")) == before
        return said

    path.write_text("mine")
    assert str(path) in refused(path) and path.read_text() == "mine"
    assert str(path) in refused(path / "below")
    path.unlink()
    path.symlink_to(path)
    assert str(path) in refused(path)
    path.unlink()
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    assert str(path) in refused(path)
    (path / "manifest.json").unlink()
    monkeypatch.setattr("os.access", lambda *_: False)  # as for a user who is not root
    assert "is read-only" in refused(path)


def test_a_profile_says_before_it_measures_that_its_file_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "costs.json"
    path.write_bytes(STRANGERS["lengths"])
    assert main(["profile", "--model", "gpt", "--output", str(path), "--", "--dynapipe-device", "cpu"]) == 2
    assert "a file that this program wrote, it is another" in capsys.readouterr().err
    assert path.read_bytes() == STRANGERS["lengths"]
