"""Training by the entry scripts on rehearsed GPUs: nothing of Megatron is replaced, and losses are the CPU's."""

import math
from pathlib import Path

import pytest

from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import build
from tests.helpers.rehearsal.jobs import Job, run_all

pytestmark = pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++")

LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization"
"""As the run files say; weights are drawn on the host, where those of the CPU's run are."""
TWO_STAGES = f"{LOCAL} --pipeline-model-parallel-size 2 --train-iters 3"
FAMILIES = ["gpt", "t5"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random")


@pytest.fixture(scope="module")
def rehearsed(data, tmp_path_factory):
    """Every family's run of two ranks, over NCCL, from one process."""
    folder = tmp_path_factory.mktemp("rehearsal")
    jobs = [
        Job(
            entry_scripts.script_of(family),
            entry_scripts.words(family, data, TWO_STAGES, report=folder / family),
            ranks=2,
        )
        for family in FAMILIES
    ]
    return dict(zip(FAMILIES, run_all(jobs, folder), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_on_gpus_has_the_losses_of_one_on_the_cpu(family, rehearsed, data, tmp_path):
    ranks = rehearsed[family]
    assert not isinstance(ranks, str), ranks
    assert [rank["status"] for rank in ranks] == [0, 0], ranks[0]["stderr"] + ranks[1]["stderr"]
    on_cpu = entry_scripts.losses(family, data, TWO_STAGES, ranks=2, report=tmp_path)
    assert ranks[-1]["losses"].keys() == on_cpu.keys() and len(on_cpu) == 3
    for iteration, loss in on_cpu.items():
        assert math.isclose(ranks[-1]["losses"][iteration], loss, rel_tol=1e-4), iteration
