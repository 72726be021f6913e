"""DynaPipe as a switch: a GPT on samples of one length, with DynaPipe and with stock Megatron, has the same losses.

Stock is Megatron's own `pretrain`, model, attention and schedules (`stock_megatron`). The samples of every iteration
and the initial weights (a checkpoint's) are the same; micro-batches are the plan's on one side, pairs of samples on
the other.
"""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli import main
from tests.helpers import entry_scripts
from tests.helpers.planning_commands import model_file
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

TWO = "--pipeline-model-parallel-size 2"
LENGTH = "--seq-length 40"
LAYOUTS = [
    # ranks, flags, Megatron's schedule; the last word says whether it runs every day
    (2, TWO, "without_interleaving", "core"),
    (4, f"{TWO} --tensor-model-parallel-size 2", "without_interleaving", "slow"),
    (4, f"{TWO} --use-distributed-optimizer --overlap-grad-reduce", "without_interleaving", "slow"),
    (2, f"{TWO} --num-layers-per-virtual-pipeline-stage 1", "with_interleaving", "slow"),
]


def row(ranks: int, flags: str, schedule: str, when: str) -> object:
    marks, iterations = ((), 10) if when == "core" else (pytest.mark.slow, 50)
    name = f"{ranks} ranks, {flags.replace('--', '')}"
    return pytest.param(ranks, flags, schedule, iterations, id=name, marks=marks)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Samples of 41 tokens: inputs of 40, targets of one."""
    folder = tmp_path_factory.mktemp("data") / "one-length"
    return make_dataset(folder, samples=160, lengths=(40, 41), target=2)


def train_stock(data: Path, flags: str, ranks: int, *, patched: bool = False) -> list[dict]:
    argv = f"{entry_scripts.SMALL['gpt']} {entry_scripts.TRAINING} {LENGTH} {flags}".split()
    return run_ranks(
        "tests.helpers.stock_megatron:train",
        ranks,
        {"argv": argv, "data": str(data), "patched": patched},
        deadline_s=200,
    )


def train_planned(data: Path, flags: str, ranks: int, report: Path) -> list[dict]:
    return entry_scripts.train("gpt", data, f"{LENGTH} {flags}", ranks=ranks, report=report, deadline_s=200)


@pytest.fixture(scope="module")
def start(data, tmp_path_factory) -> str:
    """The flags to begin with the weights that one process has after an iteration."""
    folder = tmp_path_factory.mktemp("weights")
    train_stock(data, f"--train-iters 1 --save {folder} --save-interval 1", 1)
    return f"--load {folder} --finetune"


@pytest.mark.parametrize(("ranks", "flags", "schedule", "iterations"), [row(*fields) for fields in LAYOUTS])
def test_iterations_have_the_losses_of_stock_megatron(ranks, flags, schedule, iterations, start, data, tmp_path):
    flags += f" {start} --train-iters {iterations}"
    theirs = train_stock(data, flags, ranks)
    assert {name for run in theirs for name in run["schedules"]} == {f"forward_backward_pipelining_{schedule}"}
    expected = theirs[-1]["losses"]
    ours = train_planned(data, flags, ranks, tmp_path)[-1]["losses"]
    assert ours == pytest.approx(expected, rel=1e-5) and len(ours) == iterations
    assert expected[str(iterations)] < expected["1"] - 0.1


@pytest.mark.parametrize("pattern", ["", pytest.param("+-+-|+-+-", marks=pytest.mark.slow)])
def test_latent_attention_has_the_losses_of_stock_megatron(pattern, data, tmp_path):
    """DeepSeek's, in padded and in packed rows, and in pieces of samples."""
    flags = "--multi-latent-attention --position-embedding-type rope --rope-type rope --kv-lora-rank 16"
    flags += " --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12 --normalization RMSNorm"
    flags += " --disable-bias-linear"
    start = f"{flags} --save {tmp_path / 'saved'} --save-interval 1 --train-iters 1"
    train_stock(data, start + (pattern and f" --hybrid-layer-pattern {pattern.replace('|', '')}"), 1)
    flags += f" --load {tmp_path / 'saved'} --finetune --train-iters 4 {TWO}"
    flags += pattern and f" --hybrid-layer-pattern {pattern}"
    expected = train_stock(data, flags, 2)[-1]["losses"]
    for layout in ("padded", "packed", "packed --dynapipe-slices 16"):
        ours = train_planned(data, f"{flags} --dynapipe-layout {layout}", 2, tmp_path / layout)[-1]["losses"]
        assert ours == pytest.approx(expected, rel=1e-5) and len(ours) == 4


@pytest.mark.slow
def test_packed_rows_of_samples_of_one_length_have_the_losses_of_stock_megatron(start, data, tmp_path):
    flags = f"{TWO} {start} --train-iters 50"
    expected = train_stock(data, flags, 2)[-1]["losses"]
    ours = train_planned(data, f"{flags} --dynapipe-layout packed", 2, tmp_path)[-1]["losses"]
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "skipped"), [("--bf16", 0), ("--fp16 --initial-loss-scale 2048 --hysteresis 1", 3)], ids=["bf16", "fp16"]
)
def test_half_precision_has_the_losses_of_stock_megatron(half, skipped, start, data, tmp_path):
    """Gradients of the first iterations overflow at that loss scale: both skip the same steps, and halve it."""
    flags = f"{TWO} {start} --train-iters 12 {half}"
    expected = train_stock(data, flags, 2)[-1]["losses"]
    last = train_planned(data, flags, 2, tmp_path)[-1]
    assert last["losses"] == pytest.approx(expected, rel=1e-4)
    stepped = [str(iteration) for iteration in range(skipped + 1, 13)]
    assert list(last["norms"]) == stepped, "Megatron logs the norms of steps that it makes"
    assert expected["12"] < expected["1"] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("on_first", [True, False], ids=["on, then off", "off, then on"])
@pytest.mark.parametrize(
    ("optimizer", "ours"),
    [("", ""), ("--use-distributed-optimizer", ""), ("", "--dynapipe-layers-per-stage 2.5,1.5")],
    ids=["plain", "distributed optimizer", "half layers"],
)
def test_a_run_goes_on_with_dynapipe_switched(optimizer, ours, on_first, start, data, tmp_path):
    flags = f"{TWO} {optimizer} --train-iters 6"
    saving = f"{flags} {start} --save {tmp_path / 'saved'} --save-interval 3 --exit-interval 3"
    loading = f"{flags} --load {tmp_path / 'saved'}"
    whole = train_stock(data, f"{flags} {start}", 2)[-1]["losses"]
    if on_first:
        train_planned(data, f"{saving} {ours}", 2, tmp_path / "report")
        rest = train_stock(data, loading, 2, patched=True)[-1]["losses"]
    else:
        train_stock(data, saving, 2)
        rest = train_planned(data, f"{loading} {ours}", 2, tmp_path / "report")[-1]["losses"]
    assert rest == pytest.approx({iteration: whole[iteration] for iteration in "456"}, rel=1e-5)


def test_stock_megatron_trains_the_stages_that_plan_exports(data, tmp_path, capsys):
    """A split that divides layers, for a pattern; and its best split of whole layers, for a layout."""
    model = model_file(tmp_path, layers=4, hidden=32)
    words = f"plan --data {data} --global-batch-size 16 --limit 1 --cost-model analytic --model-config {model}"
    words += " --pipeline-parallel 2 --device-memory-mb 4000 --layer-split 2.5,1.5 --search-evaluations 0"
    words += " --export megatron --json"
    assert main.main(words.split()) == 0
    flags = json.loads(capsys.readouterr().out)["export"]["flags"]
    assert run_ranks(read_by_megatron, 1, {"flags": flags}) == [([5, 3], 4)]
    del flags["--hybrid-layer-pattern"]
    ran = train_stock(data, " ".join(word for flag in flags.items() for word in flag) + " --train-iters 2", 2)
    assert list(ran[-1]["losses"]) == ["1", "2"]


def read_by_megatron(rank: int, world_size: int, flags: dict[str, str]) -> tuple[list[int], int]:
    """Modules of every segment and layers of the layout, by Megatron's own parsers."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, validate_segment_layers
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    pattern = parse_hybrid_pattern(flags["--hybrid-layer-pattern"]).main_pattern
    layout = PipelineParallelLayerLayout.parse_str_to_list(flags["--pipeline-model-parallel-layout"])
    layers = sum(kind is LayerType.decoder for stage in layout for kind in stage)
    return [len(validate_segment_layers(segment)) for segment in pattern.split("|")], layers
