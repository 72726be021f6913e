"""The checks for GPUs run without one, over the same code paths at small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import machine, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.skipif(not (ROOT / ".demo" / "data").exists(), reason="the demo data is not built (make setup)")
def test_the_gpu_script_runs_on_a_cpu(tmp_path):
    output = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/gpu/run.py", "--device", "cpu", "--small", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=470, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_of_cost_accuracy_runs_small_anywhere(tmp_path):
    command = [sys.executable, "-m", "benchmarks.cost_accuracy.run", "--output", tmp_path, "--size", "small"]
    done = subprocess.run(
        [*command, "--models", "gpt"], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())["gpt"]
    assert figures["as profiled"]["iterations"] == 3 and figures["as profiled"]["mean_error"] < 2
    assert abs(figures["memory"]["error_of_both"][0]) < 0.2
    assert {"device", "dtype", "attention", "torch", "date"} <= figures["provenance"].keys()
    assert json.loads((tmp_path / "gpt.json").read_text())["peak_covers_backward"]


def test_a_figure_out_of_bounds_and_a_failed_process_are_failures(tmp_path):
    def python(code, seconds):
        return lambda: machine.run([[sys.executable, "-c", code]], machine.Budget(seconds), log=tmp_path / "log")

    def made(check):
        return run.line_of(run.made("it", check)).replace("\n", " | ")

    bad = made(lambda: run.within({"ratio": (1.5, 1.02), "losses": (0.1, 1.0)}))
    assert bad.startswith("failed") and "ratio 1.5, ratio_bound 1.02, losses 0.1" in bad
    worse = made(python("print('said'); raise SystemExit(3)", 60))
    assert worse.startswith("failed") and "ended with 3" in worse and "said" in worse
    late = made(python("import time; time.sleep(60)", 6))
    assert late.startswith("failed") and "time.sleep" in late
    never = made(python("", 0))
    assert never.startswith("not run") and "no time left" in never
    assert made(lambda: run.within({"ratio": (float("nan"), 1.02)})).startswith("failed")
