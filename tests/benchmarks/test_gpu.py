"""The checks for GPUs, over the same code paths without one."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT, environment
from benchmarks.gpu import checks, machine
from benchmarks.gpu import run as gpu
from benchmarks.throughput import report
from tests.helpers.commands import run_python

WANTS_DATA = pytest.mark.skipif(not (ROOT / ".demo" / "data").exists(), reason="no demo data (make setup)")


def run(folder: Path, *words: str, timeout_s: float) -> dict[str, Any]:
    """What `run.py` reports of this machine without a GPU."""
    output = folder / "report.json"
    script = ("benchmarks/gpu/run.py", "--device", "cpu", "--small", "--output", output)
    run_python(*script, *words, timeout_s=timeout_s, **environment())
    report: dict[str, Any] = json.loads(output.read_text())
    return report


@pytest.mark.slow
@pytest.mark.timeout(900)
@WANTS_DATA
def test_all_checks_pass_that_want_no_gpu(tmp_path):
    report = run(tmp_path, "--budget-s", "850", timeout_s=880)
    assert report["format"] == "dynapipe-gpu-report/1" and report["device"] == "cpu" and report["torch"]
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {
        "tests marked gpu",
        "t5: entry script, Transformer Engine's layers, against the CPU",
        "compute-sanitizer",
    }
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["t5: throughput of real training"]["planned_tokens_per_s"] > 0
    assert figures["t5: 2 stages on one device, bf16"]["gradients"] > 1e-4, "bf16, not fp32"


def test_a_part_of_the_checks_in_processes_that_stay_up(tmp_path):
    report = run(tmp_path, "--only", "t5: one rank|sanitizer", timeout_s=240)
    assert [(check["name"], check["outcome"]) for check in report["checks"]] == [
        ("t5: one rank against the CPU", "passed"),
        ("compute-sanitizer", "not run"),
    ]


@pytest.mark.slow
def test_what_no_check_is_called(tmp_path):
    with pytest.raises(AssertionError, match="expected --only to match one of t5: entry script against the CPU; "):
        run(tmp_path, "--only", "nothing", timeout_s=60)


def line(check: Any) -> str:
    return gpu.line_of(gpu.outcome_of("it", check)).replace("\n", " | ")


def test_whatever_a_check_raises_it_is_a_line_and_the_report_is_whole_after_each(tmp_path):
    def python(code, seconds):
        return lambda: machine.run([[sys.executable, "-c", code]], machine.Budget(seconds), log=tmp_path / "log")

    bad = line(lambda: checks.within({"ratio": (1.5, 1.02), "losses": (0.1, 1.0)}))
    assert bad.startswith("failed") and "ratio 1.5, ratio_bound 1.02, losses 0.1" in bad
    worse = line(python("print('said'); raise SystemExit(3)", 60))
    assert worse.startswith("failed") and "ended with 3" in worse and "said" in worse
    late = line(python("import time; time.sleep(60)", 6))
    assert late.startswith("failed") and "time.sleep" in late and "did not end in time" in late
    never = line(python("", 0))
    assert never.startswith("not run") and "no time left" in never
    assert line(lambda: checks.within({"ratio": (float("nan"), 1.02)})).startswith("failed")
    raises = line(lambda: {}["ratio"])
    assert raises.startswith("failed") and "KeyError: 'ratio'" in raises
    for count in (1, 2):
        gpu.write(tmp_path / "report.json", {"device": "cpu"}, [gpu.Check("it", "failed", {"ratio": 1.5}, 0.1)] * count)
        assert len(json.loads((tmp_path / "report.json").read_text())["checks"]) == count


@pytest.mark.slow
def test_ranks_that_fail_are_named_and_start_anew(tmp_path):
    case = checks.Case(device="cpu", small=True, budget=machine.Budget(120), folder=tmp_path)
    try:
        with pytest.raises(machine.ProcessFailedError, match=r"ended with 1:[^~]*Error"):
            case.train("gpt 1x1x1, layers 3.5")
        assert not case._up
    finally:
        case.end()


def test_figures_of_throughput_are_those_of_its_report():
    turn = {"ms": 10.0, "real_tokens": 100, "positions": 100, "predicted_ms": None, "idle": [], "planning_ms": None}
    turn |= {"peaks_mb": [1.0], "micro_batches": 1, "loss": 1.0}
    planned, slower = {0: turn, 1: turn}, {0: turn, 1: turn | {"ms": 20.0}}
    rows = [
        report.figures({"method": name}, turns, planned)
        for name, turns in (("planned", planned), ("token_based", slower))
    ]
    assert checks.throughput_figures(json.loads(report.to_json(rows))["rows"]) == {
        "planned_tokens_per_s": 10_000.0,
        "token_based_tokens_per_s": 5_000.0,
        "token_based_ratio": 0.5,
    }


@pytest.mark.slow
@WANTS_DATA
def test_an_archive_holds_what_a_machine_without_a_network_needs(tmp_path):
    archive = tmp_path / "gpu.tgz"
    subprocess.run(["benchmarks/gpu/carry.sh", archive, "msgspec"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    assert {"dynapipe/COMMIT", "dynapipe/benchmarks/gpu/start.sh", "dynapipe/.demo/data/train.bin"} <= names
    assert any(name.startswith("dynapipe/megatron_dynapipe/planning/_native") for name in names)
    assert [name for name in names if name.startswith("dynapipe/wheels/msgspec-")]
