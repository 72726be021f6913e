import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_gpt.py")

ARGUMENTS = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "511"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--tokenizer-type", "NullTokenizer"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "2", "--lr", "1e-3"),
    *("--dataloader-type", "external", "--calculate-per-token-loss", "--eval-interval", "1", "--eval-iters", "1"),
    *("--log-interval", "1", "--no-one-logger"),
]


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"iteration +\d+/ .*lm loss: (\S+)", log)]


@pytest.fixture(scope="module")
def log_of_one_rank() -> str:
    """What a run in a process of its own prints, on standard output and standard error together."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    run = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *ARGUMENTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def train(rank: int, world_size: int, arguments: list[str]) -> str:
    """What a rank of a run prints."""
    sys.argv = [str(SCRIPT), *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(SCRIPT))["main"]()
    return output.getvalue()


def test_megatrons_own_loop_trains_and_evaluates_on_the_cpu(log_of_one_rank):
    assert len(losses(log_of_one_rank)) == 2
    assert all(5 < loss < 7.5 for loss in losses(log_of_one_rank))  # near ln 512 = 6.2
    assert "validation loss at iteration 1" in log_of_one_rank


def test_start_up_messages_are_filtered(log_of_one_rank):
    lines = log_of_one_rank.splitlines()
    assert len(lines) < 70, log_of_one_rank
    found = [line for line in lines if re.search("Warning|DEPRECATED|RNG state|RerunState|Apex|OptimizerConfig", line)]
    assert found == []


@pytest.mark.parametrize(
    "layout",
    [
        ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"],
        ["--tensor-model-parallel-size", "2", "--bf16"],
    ],
    ids=["two stages", "two tensor ranks in bf16"],
)
def test_two_ranks_train_on_gloo(layout):
    logs = run_ranks(train, 2, {"arguments": [*ARGUMENTS, *layout]})
    assert len(losses("".join(logs))) == 2
