"""Damaged and hostile files: one error of a line and a hint, exit status 2, and never a read without an end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.main import main
from tests.helpers.planning_commands import arguments


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err.partition("error: ")[2]


def batches(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": found}))
    return path


@pytest.mark.parametrize("length", [-1, 0, 2**31, 2**70, 1.5])
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_lengths_that_no_sample_has(tmp_path: Path, cost_file: Path, capsys: Any, length: float, command: str) -> None:
    path = batches(tmp_path / "b.json", {"id": "b0", "input": [8, length]})
    assert "$.batches[0].input[1]" in refused(capsys, *arguments(command, path, cost_file))


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_an_empty_batch_has_no_plan(tmp_path: Path, cost_file: Path, capsys: Any, command: str) -> None:
    path = batches(tmp_path / "b.json", {"id": "b0", "input": []})
    assert main(arguments(command, path, cost_file)) == 1
    assert "expected at least one sample" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", ".", "..", ".hidden", "", "a\0b", "x" * 129])
def test_ids_of_batches_are_names(tmp_path: Path, cost_file: Path, capsys: Any, name: str) -> None:
    path = batches(tmp_path / "b.json", {"id": name, "input": [8, 9]})
    folder = tmp_path / "a" / "plans"
    said = refused(capsys, *arguments("plan", path, cost_file, "--output", str(folder)))
    assert "expected ids of 1 to 128 letters, digits, dots, dashes or underscores" in said
    assert not list(tmp_path.rglob("*.plan"))


def test_two_batches_of_one_id_are_refused(tmp_path: Path, cost_file: Path, capsys: Any) -> None:
    path = batches(tmp_path / "b.json", {"id": "b", "input": [8]}, {"id": "b", "input": [9]})
    assert "expected every id once, got 'b' twice" in refused(capsys, *arguments("plan", path, cost_file))


@pytest.fixture(params=["fifo", "/dev/zero"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param != "fifo":
        return Path(request.param)
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_files_without_an_end_are_not_read(endless: Path, batches_file: Path, cost_file: Path, capsys: Any) -> None:
    for words in (
        arguments("plan", endless, cost_file),
        arguments("plan", batches_file, endless),
        ["verify", str(endless)],
        ["show", str(endless)],
        ["cost-model", "show", str(endless)],
        ["data", "prepare", str(endless), "--output", "nowhere"],
    ):
        assert "expected a regular file, found a" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("keys", "tp1_none", "model_state_mb", "encoder"), 1e300, "model_state_mb"),
        (("keys", "tp1_none", "time_ms", "encoder.forward", "8"), [[2**70, 1.0]], "time_ms"),
        (("keys", "tp1_none", "time_ms", "encoder.forward"), {str(2**70): [[1, 1.0]]}, "expected keys of 1"),
        (("keys", "tp1_none", "time_ms", "encoder.forward"), {"9" * 5000: [[1, 1.0]]}, "expected keys of 1"),
        (("links",), {"intra-node": {"latency_us": 1e300, "gbps": 1.0}}, "latency_us"),
        (("keys", "tp1_none", "tp"), 2**70, "tp"),
    ],
)
def test_numbers_that_no_cost_model_has(batches_file, cost_file, capsys, place, value, said):
    file = json.loads(cost_file.read_text())
    holder = file
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = value
    cost_file.write_text(json.dumps(file))
    assert said in refused(capsys, *arguments("plan", batches_file, cost_file))


@pytest.mark.parametrize(
    "words",
    [
        ("--device-memory-mb", "nan"),
        ("--device-memory-mb", "inf"),
        ("--device-memory-mb", "-1"),
        ("--device-memory-mb", "1e300"),
        ("--hidden-size", str(10**30)),
        ("--layers", str(10**30)),
        ("--pipeline-parallel", str(10**12)),
        ("--data-parallel", str(10**30)),
        ("--search-evaluations", "-1"),
        ("--search-evaluations", str(10**30)),
        ("--schedule", ""),
        ("--seed", "-1"),
        ("--seed", str(10**30)),
        ("--intra-node-gbps", "0"),
        ("--inter-node-gbps", "nan"),
        ("--intra-node-latency-us", "-1"),
        ("--inter-node-latency-us", "1e300"),
        ("--layer-split", "1,2,three"),
        ("--layer-split", f"1,{10**30}"),
        ("--max-seq-len", "1e3"),
    ],
)
def test_numbers_that_no_plan_is_made_of(batches_file, cost_file, capsys, words):
    assert refused(capsys, *arguments("plan", batches_file, cost_file, *words))


def test_a_full_disk_behind_stdout_is_one_error(batches_file: Path, cost_file: Path) -> None:
    words = [sys.executable, "-m", "megatron_dynapipe", *arguments("plan", batches_file, cost_file)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_outputs_that_cannot_be_written_are_one_error(tmp_path, batches_file, cost_file, capsys):
    said = refused(capsys, *arguments("plan", batches_file, cost_file, "--output", "/proc/plans"))
    assert "cannot write /proc/plans/b0.plan" in said
    assert main(arguments("plan", batches_file, cost_file, "--output", str(tmp_path))) == 0
    for flag, name in (("--picture", "plan.png"), ("--trace", "plan.json")):
        said = refused(capsys, "show", str(tmp_path / "b0.plan"), flag, f"/proc/{name}")
        assert f"/proc/{name}" in said


@pytest.mark.parametrize(
    "words",
    [
        ("cost-model", "check", "{costs}", "--seed", "-1"),
        ("data", "prepare", "{rows}", "--output", "made", "--vocabulary-size", "-5"),
        ("data", "prepare", "{rows}", "--output", "made", "--vocabulary-size", str(10**30)),
    ],
)
def test_arguments_that_libraries_choke_on(tmp_path, cost_file, capsys, words):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"task": "a", "input": "b", "target": "c"}\n')
    assert refused(capsys, *(word.format(costs=cost_file, rows=rows) for word in words))
