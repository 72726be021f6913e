"""Training by the entry scripts on rehearsed GPUs: nothing of Megatron is replaced, and losses are the CPU's."""

import math
from pathlib import Path

import pytest

from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import build
from tests.helpers.rehearsal.jobs import Job, run_all

pytestmark = pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++")

LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
"""As the run files say."""
TWO_STAGES = f"{LOCAL} --pipeline-model-parallel-size 2"
FAMILIES = ["gpt", "t5"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random")


@pytest.fixture(scope="module")
def flags(data, tmp_path_factory):
    """A family's run from its second iteration on, from the checkpoint that a run on the CPU saves after its first."""
    folder = tmp_path_factory.mktemp("saved")

    def of(family: str) -> str:
        return f"{TWO_STAGES} --load {folder / family} --no-load-rng --override-opt-param-scheduler --train-iters 4"

    for family in FAMILIES:
        first = f"{TWO_STAGES} --save {folder / family} --save-interval 1 --train-iters 1"
        entry_scripts.losses(family, data, first, ranks=2, report=folder / "report")
    return of


@pytest.fixture(scope="module")
def rehearsed(data, flags, tmp_path_factory):
    """Every family's run of two ranks, over NCCL, from one process."""
    folder = tmp_path_factory.mktemp("rehearsal")
    jobs = [
        Job(
            entry_scripts.script_of(family),
            entry_scripts.words(family, data, flags(family), report=folder / family),
            ranks=2,
        )
        for family in FAMILIES
    ]
    return dict(zip(FAMILIES, run_all(jobs, folder), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_on_gpus_has_the_losses_of_one_on_the_cpu(family, rehearsed, flags, data, tmp_path):
    ranks = rehearsed[family]
    assert not isinstance(ranks, str), ranks
    assert [rank["status"] for rank in ranks] == [0, 0], ranks[0]["stderr"] + ranks[1]["stderr"]
    on_cpu = entry_scripts.losses(family, data, flags(family), ranks=2, report=tmp_path)
    assert ranks[-1]["losses"].keys() == on_cpu.keys() == {"2", "3", "4"}
    for iteration, loss in on_cpu.items():
        assert math.isclose(ranks[-1]["losses"][iteration], loss, rel_tol=1e-5), iteration
