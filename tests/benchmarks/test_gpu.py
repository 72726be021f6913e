"""The checks for GPUs run without one, over the same code paths at small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
        "compute-sanitizer",
    }
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["t5: throughput of real training"]["planned_tokens_per_s"] > 0
    assert figures["t5: 2 stages on one device, bf16"]["gradients"] > 1e-4, "bf16, not fp32"


def test_a_figure_out_of_bounds_and_a_failed_process_are_failures():
    script = """
import sys
sys.path.insert(0, "benchmarks/gpu")
import run, machine, tempfile, pathlib
def bad():
    return run.within({"ratio": (1.5, 1.02), "losses": (0.1, 1.0)})
def worse():
    machine.run([[sys.executable, "-c", "print('said'); raise SystemExit(3)"]], machine.Budget(60), log=log)
def late():
    machine.run([[sys.executable, "-c", "import time; time.sleep(60)"]], machine.Budget(6), log=log)
def never():
    machine.run([[sys.executable, "-c", ""]], machine.Budget(0), log=log)
def unknown():
    return run.within({"ratio": (float("nan"), 1.02)})
with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "log"
    for check in (bad, worse, late, never, unknown):
        print(run.line_of(run.made("it", check)).replace("\\n", " | "))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    bad, worse, late, never, unknown = done.stdout.strip().splitlines()
    assert bad.startswith("failed") and "ratio 1.5, ratio_bound 1.02, losses 0.1" in bad
    assert worse.startswith("failed") and "ended with 3" in worse and "said" in worse
    assert late.startswith("failed") and "time.sleep" in late
    assert never.startswith("not run") and "no time left" in never
    assert unknown.startswith("failed")
