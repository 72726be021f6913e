"""`benchmarks/` on rehearsed GPUs: what of its checks needs no kernel, and Megatron's own training."""

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


SMALL = (
    "--device cuda --size gpu --model gpt --profile-minutes 0 --rounds 1 --ranks 1 --methods planned,stock --batches 1"
    " --data .demo/data --max-lengths 128 --json"
)
MODEL = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --global-batch-size 8 --num-layers 2"


def run(*words: str, engine: bool) -> str:
    """What a script says, on two GPUs."""
    done = subprocess.run(
        [sys.executable, *words],
        env=launch.environment(2, engine=engine),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_checks_without_kernels_pass(tmp_path):
    output = tmp_path / "report.json"
    words = ["--output", str(output), "--budget-s", "3000", "--only", f"^(?!.*({BY_KERNELS}))"]
    said = run("benchmarks/gpu/run.py", *words, engine=True)
    outcomes = {check["name"]: check["outcome"] for check in json.loads(output.read_text())["checks"]}
    assert outcomes and "failed" not in outcomes.values(), said


@pytest.mark.parametrize("engine", [False, True])
def test_megatrons_own_training_is_compared_on_gpus(engine, tmp_path):
    output = tmp_path / "report.json"
    said = run("benchmarks/throughput/run.py", *SMALL.split(), str(output), "--", *MODEL.split(), engine=engine)
    assert output.exists(), said
    losses = {row["method"]: row["first_loss"] for row in json.loads(output.read_text())["rows"]}
    assert losses["stock"] == pytest.approx(8.32, abs=0.1), said  # the logarithm of the vocabulary
