"""`benchmarks/` on rehearsed GPUs: what of its checks needs no kernel, and training compared with Megatron's own."""

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
TOO_LARGE = "throughput|own packed rows"
"""Of models of a GPU's size; smaller ones are trained below."""
SMALL = (
    "--device cuda --size gpu --profile-minutes 0 --rounds 1 --ranks 1 --batches 1 --data .demo/data --max-lengths 128"
)
MODEL = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --global-batch-size 8"
COMPARED = {
    "gpt": ("--model gpt --methods planned,stock", "--num-layers 2"),
    "t5": ("--model t5 --methods planned,packed_rows,token_based", "--encoder-num-layers 2 --decoder-num-layers 2"),
}


def run(*words: str, engine: bool) -> str:
    """What a script says, on eight GPUs."""
    done = subprocess.run(
        [sys.executable, *words],
        env=launch.environment(8, engine=engine),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_checks_without_kernels_pass(tmp_path):
    output = tmp_path / "report.json"
    words = ["--output", str(output), "--budget-s", "3000", "--only", f"^(?!.*({BY_KERNELS}|{TOO_LARGE}))"]
    said = run("benchmarks/gpu/run.py", *words, engine=True)
    outcomes = {check["name"]: check["outcome"] for check in json.loads(output.read_text())["checks"]}
    assert outcomes and "failed" not in outcomes.values(), said


def test_the_engine_is_tried_before_checks_that_want_it():
    assert "fused attention, as it is: runs" in run("benchmarks/gpu/engine.py", engine=True)
    assert "as it is: status 1" in run("benchmarks/gpu/engine.py", engine=False)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("family", COMPARED)
def test_methods_are_compared_on_gpus(family, engine, tmp_path):
    output, (methods, layers) = tmp_path / "report.json", COMPARED[family]
    words = [*f"{SMALL} {methods} --json {output} --".split(), *f"{MODEL} {layers}".split()]
    said = run("benchmarks/throughput/run.py", *words, engine=engine)
    assert output.exists(), said
    losses = [row["first_loss"] for row in json.loads(output.read_text())["rows"]]
    assert losses == pytest.approx([8.32] * len(methods.split(",")), abs=0.1), said  # the logarithm of the vocabulary
