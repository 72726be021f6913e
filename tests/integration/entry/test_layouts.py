"""Entry scripts under layouts of every kind, from one checkpoint, against one process.

Every day `test_exactness` holds layouts without the scripts, `test_checkpoints` and `test_experts` scripts in layouts.
"""

import functools
from pathlib import Path

import pytest

from tests.helpers.entry_scripts import train

pytestmark = pytest.mark.slow

OPTIMIZER = "--use-distributed-optimizer"
OVERLAP = f"{OPTIMIZER} --overlap-grad-reduce --overlap-param-gather"
TENSOR = "--tensor-model-parallel-size 2"
TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
TWO_CHUNKS = f"{TWO} --num-layers-per-virtual-pipeline-stage 1"

LAYOUTS = [
    ("gpt", 2, f"{TWO} --pipeline-model-parallel-layout Et|t|t|tL --dynapipe-limit-rc-type full"),
    ("gpt", 4, f"{FOUR} --pipeline-model-parallel-layout E|tt|tt|L"),
    ("gpt", 2, f"{TWO} --decoder-first-pipeline-num-layers 3"),
    ("gpt", 4, f"{TENSOR} {TWO} --dynapipe-limit-rc-type selective"),
    ("gpt", 4, f"{TENSOR} {TWO_CHUNKS}"),
    ("gpt", 4, f"{TWO_CHUNKS} {OVERLAP}"),
    ("gpt", 4, f"{TWO_CHUNKS} {OVERLAP} --dynapipe-limit-rc-type none,full"),
    ("gpt", 8, f"{TENSOR} {TWO} {OPTIMIZER}"),
    ("t5", 4, f"{TWO} {OVERLAP}"),
    ("t5", 2, f"{TWO} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("t5", 8, f"{TENSOR} {TWO} {OPTIMIZER}"),
]


@pytest.fixture(scope="module")
def started(data, tmp_path_factory):
    """By family: a checkpoint of one iteration in one process, and the losses of the four that follow there."""

    @functools.cache
    def start(family: str) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp(family)
        report, weights = folder / "report", folder / "weights"
        train(family, data, f"--train-iters 1 --save-interval 1 --save {weights}", ranks=1, report=report)
        flags = f"--train-iters 4 --load {weights} --finetune"
        return weights, train(family, data, flags, ranks=1, report=report)[0]["losses"]

    return start


@pytest.mark.parametrize(("family", "ranks", "flags"), LAYOUTS, ids=str)
def test_a_layout_goes_on_from_a_checkpoint_as_one_process_does(family, ranks, flags, started, data, tmp_path):
    weights, expected = started(family)
    runs = train(family, data, f"--train-iters 4 --load {weights} --finetune {flags}", ranks=ranks, report=tmp_path)
    assert len(runs[-1]["losses"]) == 4
    for run in runs:
        assert not run["losses"] or run["losses"] == pytest.approx(expected, rel=1e-4)


def test_a_batch_of_fewer_samples_than_replicas_trains_as_on_one(data, tmp_path):
    few = "--tokens-per-global-batch 70 --train-iters 3"
    alone = train("gpt", data, few, ranks=1, report=tmp_path / "alone")[0]["losses"]
    runs = train("gpt", data, f"{few} {OVERLAP}", ranks=2, report=tmp_path / "replicas")
    assert runs[-1]["losses"] == pytest.approx(alone, rel=1e-5) and len(alone) == 3


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_three_tensor_parallel_ranks(family, data, tmp_path):
    """Heads and widths that three divides, and a vocabulary that is padded to the same 516 words on one rank."""
    size = "--hidden-size 48 --num-attention-heads 6 --ffn-hidden-size 96 --make-vocab-size-divisible-by"
    weights = tmp_path / "weights"
    train(family, data, f"{size} 12 --train-iters 1 --save-interval 1 --save {weights}", ranks=1, report=tmp_path)
    goes_on = f"--train-iters 4 --load {weights} --finetune"
    alone = train(family, data, f"{size} 12 {goes_on}", ranks=1, report=tmp_path)[0]["losses"]
    three = f"--tensor-model-parallel-size 3 {TWO} --dynapipe-scatter-gather on"
    runs = train(family, data, f"{size} 4 {goes_on} {three}", ranks=6, report=tmp_path)
    assert runs[-1]["losses"] == pytest.approx(alone, rel=1e-4)
    assert len(alone) == 4


DROPOUT = "--clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.mark.parametrize(
    ("family", "flags"),
    [("gpt", f"{TWO_CHUNKS} --bf16 {OPTIMIZER}"), ("t5", f"{TWO} --fp16 --initial-loss-scale 64 {DROPOUT}")],
)
def test_entry_scripts_train_in_half_precision(family, flags, data, tmp_path):
    runs = train(family, data, f"{flags} --train-iters 8", ranks=4, report=tmp_path)
    losses = list(runs[-1]["losses"].values())
    assert losses[-1] < losses[0]
