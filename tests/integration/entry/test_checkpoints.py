"""Runs saved under one layout and resumed under another: what they learn from then on is the same.

Weights, optimizer and random state come from the checkpoint; the samples of an iteration are the same under any layout.
"""

import shutil
from pathlib import Path

import pytest

from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset

# flags of the model, for all layouts
MODELS = {
    "t5": "",
    "t5, relative positions, untied": "--position-embedding-type relative --untie-embeddings-and-output-weights "
    "--relative-attention-num-buckets 8 --relative-attention-max-distance 32",
    "t5, rotary positions, RMSNorm": "--position-embedding-type rope --normalization RMSNorm",
    "gpt": "",
    "gpt, rotary positions": "--position-embedding-type rope",
}
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
SEQUENCE_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
# model, optimizer, ranks and flags that save, ranks and flags that resume
CASES = {
    "t5, one rank to two stages": ("t5", "", (1, ""), (2, "--pipeline-model-parallel-size 2")),
    "t5, two stages to layers 2.5 + 1.5": (
        "t5",
        "",
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage 2.5,1.5"),
    ),
    "t5, relative, one rank to two stages of two chunks": (
        "t5, relative positions, untied",
        "",
        (1, ""),
        (2, INTERLEAVED),
    ),
    "t5, relative, two chunks to sequence parallelism": (
        "t5, relative positions, untied",
        DISTRIBUTED,
        (2, INTERLEAVED),
        (2, SEQUENCE_PARALLEL),
    ),
    "t5, rotary, sequence parallelism to two replicas": (
        "t5, rotary positions, RMSNorm",
        DISTRIBUTED,
        (2, SEQUENCE_PARALLEL),
        (2, ""),
    ),
    "t5, replicas to stages, distributed optimizer": (
        "t5",
        DISTRIBUTED,
        (2, ""),
        (2, "--pipeline-model-parallel-size 2"),
    ),
    "t5, saved while training goes on, two stages to one rank": (
        "t5",
        "",
        (2, "--pipeline-model-parallel-size 2 --async-save"),
        (1, ""),
    ),
    "gpt, one rank to two stages of two chunks": ("gpt", "", (1, ""), (2, INTERLEAVED)),
    "gpt, two chunks to two replicas, distributed optimizer": ("gpt", DISTRIBUTED, (2, INTERLEAVED), (2, "")),
    "gpt, rotary, layers 2.5 + 1.5 to sequence parallelism": (
        "gpt, rotary positions",
        DISTRIBUTED,
        (2, "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage 2.5,1.5"),
        (2, SEQUENCE_PARALLEL),
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "set")


DAILY = (
    "t5, relative, one rank to two stages of two chunks",
    "gpt, two chunks to two replicas, distributed optimizer",
    "gpt, rotary, layers 2.5 + 1.5 to sequence parallelism",
)
ROWS = [pytest.param(*row, id=name, marks=[] if name in DAILY else pytest.mark.slow) for name, row in CASES.items()]


@pytest.mark.parametrize(("model", "optimizer", "saving", "resuming"), ROWS)
def test_a_run_resumes_under_another_layout(data, tmp_path, model, optimizer, saving, resuming):
    common = f"{MODELS[model]} {optimizer} --train-iters 4"
    saved = losses(model, data, f"{common} {saving[1]} --save {tmp_path} --save-interval 2", saving[0], tmp_path / "a")
    resumed = losses(
        model, data, f"{common} {resuming[1]} --load {tmp_path} --ckpt-step 2", resuming[0], tmp_path / "b"
    )
    assert saved.keys() == {"1", "2", "3", "4"} and resumed.keys() == {"3", "4"}
    for iteration, loss in resumed.items():
        assert loss == pytest.approx(saved[iteration], rel=1e-5)
    assert saved["4"] < saved["1"]


WHOLE = "--pipeline-model-parallel-size 2"
HALVES = f"{WHOLE} --dynapipe-layers-per-stage 2.5,1.5"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "saving", "resuming"), [("gpt", HALVES, WHOLE), ("t5", WHOLE, HALVES)])
def test_an_emergency_checkpoint_resumes_with_layers_divided_otherwise(data, tmp_path, model, saving, resuming):
    """What `launch` saves: Megatron's non-persistent checkpoints, here alone."""
    kind, folder = "--non-persistent-ckpt-type global", tmp_path / "saved"
    flags = f"{saving} {kind} --train-iters 4 --save {folder} --save-interval 100 --non-persistent-save-interval 3"
    saved = losses(model, data, flags, 2, tmp_path / "a")
    shutil.rmtree(folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    resumed = losses(model, data, f"{resuming} {kind} --train-iters 4 --load {folder}", 2, tmp_path / "b")
    assert resumed == {"4": pytest.approx(saved["4"], rel=1e-5)}


def losses(model: str, data: Path, flags: str, ranks: int, report: Path) -> dict[str, float]:
    """By iteration, from the last stage."""
    found: dict[str, float] = entry_scripts.train(model.split(",")[0], data, flags, ranks=ranks, report=report)[-1][
        "losses"
    ]
    return found
