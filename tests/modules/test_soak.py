"""Two hundred iterations of changing shapes leave a rank's memory where it was."""

import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.processes import run_ranks
from tests.modules.models import quiet

SOAK = Path(__file__).parents[2] / "benchmarks" / "executor" / "soak.py"


def soak(rank: int, world_size: int) -> tuple[float, float]:
    quiet()
    dist.init_process_group("gloo")
    return runpy.run_path(str(SOAK))["run"](200)


@pytest.mark.slow
def test_memory_is_flat():
    for early, late in run_ranks(soak, 2, deadline_s=280):
        assert late < 1.1 * early
