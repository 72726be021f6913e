"""`benchmarks/gpu/run.py` on rehearsed GPUs, where Transformer Engine is installed: what of it needs no kernel."""

import json
import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from tests.helpers.rehearsal import build, launch

pytestmark = [
    pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++"),
    pytest.mark.skipif(not (ROOT / ".demo" / "data").exists(), reason="the demo data is not built (make setup)"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]
BY_KERNELS = "tests marked gpu|compute-sanitizer|executor against|messages above|flex_attention|transfers beside"
"""What times, kernels and profiles of a device decide; and what is compiled."""


def test_checks_without_kernels_pass(tmp_path):
    output = tmp_path / "report.json"
    words = ["--output", str(output), "--budget-s", "3000", "--only", f"^(?!.*({BY_KERNELS}))"]
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/run.py", *words],
        env=launch.environment(2, engine=True),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = {check["name"]: check["outcome"] for check in json.loads(output.read_text())["checks"]}
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    assert outcomes and not failed, run.stdout + run.stderr
