"""A search whose process was killed leaves none of its workers behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import until

ROOT = Path(__file__).parents[3]
COMMAND = """tune --model-config configs/llama_like_8b.yaml --cost-model analytic --cluster h100_80gb --devices 8
    --batches benchmarks/data/batches/flan_like.json.gz --limit 2 --workers 2"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_workers_end_with_it() -> None:
    words = [sys.executable, "-m", "megatron_dynapipe", *COMMAND.split()]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tune:
        try:
            until(lambda: len(busy(tune.pid)) == 2)
            workers = busy(tune.pid)
        finally:
            tune.kill()
    assert not psutil.wait_procs(workers, timeout=30)[1]


def busy(pid: int) -> list[psutil.Process]:
    """Workers that have begun to plan: they run no more imports."""
    return [child for child in psutil.Process(pid).children() if sum(child.cpu_times()[:2]) > 2]
