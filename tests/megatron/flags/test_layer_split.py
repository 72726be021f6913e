"""Layers per stage that a run plans for itself."""

import re
from argparse import Namespace

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.flags.layer_split import other_flag, settle
from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset

AUTO = "--dynapipe-layers-per-stage auto"
OBSTACLE = "--pipeline-model-parallel-layout Et|tttL"
RUNS = {
    # family, ends of the inputs' lengths, flags, what is true of the layers per stage that are printed
    "t5, short inputs: the decoder's stage gives the encoder's a layer": (
        "t5", (1, 3), f"{AUTO} --dynapipe-layout padded --num-virtual-stages-per-pipeline-rank 1",
        lambda layers: layers[0] >= 3),
    "gpt, odd: the stage with the head has the fewer, in as many chunks as are faster": (
        "gpt", (1, 60), f"{AUTO} --num-layers 5",
        lambda layers: sum(layers) == 5 and sum(layers[::2]) > sum(layers[1::2])),
    "gpt, more virtual stages than layers: evened in halves over both chunks of both ranks": (
        "gpt", (1, 60), f"{AUTO} --num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
        lambda layers: len(layers) == 4 and sum(layers) == 3 and layers[1] + layers[3] <= 1.5),
    "gpt, flags that say more": ("gpt", (1, 60), f"{AUTO} {OBSTACLE}", None),
}  # fmt: skip


DAILY = [name for name in RUNS if not name.startswith("gpt, odd")]
ROWS = [pytest.param(*row, id=name, marks=[] if name in DAILY else pytest.mark.slow) for name, row in RUNS.items()]


@pytest.mark.parametrize(("family", "lengths", "flags", "holds"), ROWS)
def test_a_run_of_two_ranks_plans_its_split_and_trains(tmp_path, family, lengths, flags, holds):
    data = make_dataset(tmp_path / "data", lengths=lengths, tasks=("one", "two"), rates=(1.0, 0.5))
    flags = f"{flags} --pipeline-model-parallel-size 2 --train-iters 2"
    runs = entry_scripts.train(family, data, flags, ranks=2, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
    said = runs[0]["stdout"]
    if OBSTACLE in flags:
        assert f"layers per stage: not planned (auto), since there is {OBSTACLE}" in said
    if holds is not None:
        (split,) = re.findall(r"layers per stage: ([\d.,]+)", said)
        assert holds([float(layers) for layers in split.split(",")]), split


def asked(**given: object) -> Namespace:
    from_the_ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    whole = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    names = ("dynapipe_layers_per_stage", "pipeline_model_parallel_layout", "hybrid_layer_pattern", "use_dynapipe")
    return Namespace(**{**dict.fromkeys([*names, *from_the_ends]), **dict.fromkeys(whole, False), **given})


SETTLED = {
    # family, --dynapipe-layers-per-stage, other flags, Megatron's layout and its virtual stages
    "t5": (ModelFamily.T5, (3, 1), {}, None, None),
    "t5, virtual stages": (ModelFamily.T5, (1.5, 1, 0.5, 1), {}, None, 2),
    "gpt": (ModelFamily.GPT, "equal", {}, None, None),
    "gpt, layers": (ModelFamily.GPT, (3, 1), {}, "Ettt|tL", None),
    "gpt, the head alone": (ModelFamily.GPT, (4, 0), {}, "Etttt|L", None),
    "gpt, half layers of two chunks": (
        ModelFamily.GPT, (1.5, 0.5, 2, 1), {"num_virtual_stages_per_pipeline_rank": 2}, "Et,|t|tt|tL", None),
    "gpt, to be planned": (ModelFamily.GPT, "auto", {"num_layers": 5}, "Ettt|ttL", None),
    "gpt, to be planned in halves": (ModelFamily.GPT, "auto", {"num_layers": 1}, "E,|tL", None),
}  # fmt: skip
CONTRADICTED = {
    (1, 1, 1): ({}, "expected layers of 2 pipeline stages in --dynapipe-layers-per-stage, got 3 numbers: 1,1,1"),
    (2, 1): ({"num_virtual_stages_per_pipeline_rank": 2}, "of 2 pipeline stages with 2 virtual .* 2 numbers"),
    (1, 1): ({"pipeline_model_parallel_size": 1}, "expected layers of 1 pipeline stages .* got 2 numbers"),
    (3, 1): ({"decoder_first_pipeline_num_layers": 1}, "stage 3,1 or --decoder-first-pipeline-num-layers 1, got both"),
}


def flags_of_layers(**given: object) -> Namespace:
    chunks = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    return asked(**{**dict.fromkeys(chunks), "pipeline_model_parallel_size": 2, **given})


@pytest.mark.parametrize(("family", "layers", "given", "layout", "chunks"), SETTLED.values(), ids=SETTLED.keys())
def test_what_megatron_is_given(family, layers, given, layout, chunks):
    args = flags_of_layers(dynapipe_layers_per_stage=layers, **given)
    settle(args, family)
    assert args.pipeline_model_parallel_layout == layout
    assert args.num_virtual_stages_per_pipeline_rank == chunks


@pytest.mark.parametrize(("layers", "case"), CONTRADICTED.items(), ids=str)
def test_layers_that_other_flags_contradict(layers, case):
    given, message = case
    for family in ModelFamily:
        with pytest.raises(ConfigError, match=message):
            settle(flags_of_layers(dynapipe_layers_per_stage=layers, **given), family)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_model_parallel_layout", "Ett|ttL"),
        ("num_layers_per_virtual_pipeline_stage", 1),
        ("decoder_first_pipeline_num_layers", 1),
        ("account_for_loss_in_pipeline_split", True),
        ("num_layers", 4),
        ("num_virtual_stages_per_pipeline_rank", 2),
    ],
)
def test_flags_that_a_planned_split_gives_way_to(name, value):
    args = flags_of_layers(dynapipe_layers_per_stage="auto")
    setattr(args, name, value)
    gives_way = name not in ("num_layers", "num_virtual_stages_per_pipeline_rank")
    assert other_flag(args) == (f"--{name.replace('_', '-')} {value}" if gives_way else None)
