import re
from argparse import Namespace
from functools import partial

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models import flags
from megatron_dynapipe.units import ModelFamily
from tests.helpers.processes import run_ranks

DEPTHS = {"gpt": "--num-layers 2", "t5": "--encoder-num-layers 1 --decoder-num-layers 2"}


def run_pretrain(rank: int, world_size: int, model: str, arguments: str) -> list[float]:
    from tests.integration.models import pretrain_ranks  # imports Megatron, which only the ranks should

    return pretrain_ranks.run_pretrain(rank, world_size, model, arguments)


def losses(model: str, arguments: str, ranks: int = 1) -> list[float]:
    """Of the last rank's micro-batches, those of the iterations first, then those of the evaluations."""
    run = {"model": model, "arguments": f"{DEPTHS[model]} {arguments}"}
    return run_ranks(run_pretrain, ranks, run)[-1]


RESUMED = {
    "t5": ("t5", 1, ""),
    "t5, distributed optimizer": ("t5", 2, "--use-distributed-optimizer"),
    "gpt, distributed optimizer, reshardable": (
        "gpt",
        2,
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    ),
}


@pytest.mark.parametrize(("model", "ranks", "options"), RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_continues_as_if_uninterrupted(model, ranks, options, tmp_path):
    """Strict loading of every weight, optimizer state and random state, dropout on."""
    uninterrupted = losses(model, f"--train-iters 4 --save {tmp_path} --save-interval 2 {options}", ranks)
    resumed = losses(model, f"--train-iters 4 --load {tmp_path} --ckpt-step 2 {options}", ranks)
    micro_batches = 4 // ranks  # of this replica, in two iterations
    assert resumed == pytest.approx(uninterrupted[micro_batches:], rel=1e-6)
    assert 4 < uninterrupted[0] < 8  # near ln 512


def test_a_t5_trains_in_bf16_with_the_distributed_optimizer_and_recomputes():
    options = "--bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform"
    run = losses("t5", f"--train-iters 2 {options} --recompute-num-layers 1", ranks=2)
    assert len(run) >= 2 and all(4 < loss < 8 for loss in run)


REFUSED = {
    "Transformer Engine": (
        {"transformer_impl": "transformer_engine"},
        "--transformer-impl local (Transformer Engine is not installed), got --transformer-impl transformer_engine",
    ),
    "positions": (
        {"position_embedding_type": "mrope"},
        "--position-embedding-type learned_absolute, rope, relative or none, got mrope",
    ),
    "relative positions": (
        {"position_embedding_type": "relative", "dynapipe_attention": "megatron"},
        "--dynapipe-attention sdpa with relative positions, got --dynapipe-attention megatron",
    ),
    "scaling": (
        {"apply_query_key_layer_scaling": True},
        "no scaling by layer, got --apply-query-key-layer-scaling",
    ),
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """The message for each option of `REFUSED` given alone, and for a GPT with experts."""
    from megatron_dynapipe.integration.models.providers import check_t5_arguments, gpt_layer, gpt_provider

    accepted = {
        "transformer_impl": "local",
        "position_embedding_type": "learned_absolute",
        "dynapipe_attention": "sdpa",
        "apply_query_key_layer_scaling": False,
    }
    check_t5_arguments(Namespace(**accepted))
    check_t5_arguments(Namespace(**accepted | {"position_embedding_type": "relative"}))
    made = {
        "experts": lambda: gpt_layer(Namespace(num_experts=4, transformer_impl="local")),
        "gpt": lambda: gpt_provider(Namespace(position_embedding_type="relative")),
    }
    for option, (changes, _) in REFUSED.items():
        made[option] = partial(check_t5_arguments, Namespace(**accepted | changes))
    messages = {}
    for option, make in made.items():
        try:
            make()
        except ConfigError as error:
            messages[option] = str(error)
    return messages


def test_options_that_the_models_do_not_have_are_refused():
    messages = run_ranks(refusals, 1)[0]
    for option, (_, message) in REFUSED.items():
        assert messages[option] == f"a T5 cut into stages expects {message}"
    assert messages["experts"] == "expected a dense model, got --num-experts 4"
    assert "Megatron's GPT has no relative positions" in messages["gpt"]


def namespace(**given: object) -> Namespace:
    asked = {"position_embedding_type": "learned_absolute", "transformer_impl": "local"}
    split = ("dynapipe_layers_per_stage", "pipeline_model_parallel_layout")
    chunks = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    return Namespace(**{**asked, **dict.fromkeys([*split, *chunks]), **given})


WORDS = {
    "t5": (ModelFamily.T5, {"dynapipe_layers_per_stage": "3,1"}, []),
    "t5, relative": (ModelFamily.T5, {"position_embedding_type": "relative"}, ["--position-embedding-type", "none"]),
    "t5, relative, Transformer Engine": (
        ModelFamily.T5,
        {"position_embedding_type": "relative", "transformer_impl": "transformer_engine"},
        [],
    ),
    "gpt": (ModelFamily.GPT, {}, []),
    "gpt, layers": (
        ModelFamily.GPT,
        {"dynapipe_layers_per_stage": "3,1"},
        ["--pipeline-model-parallel-layout", "Ettt|tL"],
    ),
    "gpt, to be planned": (
        ModelFamily.GPT,
        {"dynapipe_layers_per_stage": "auto", "num_layers": 5, "pipeline_model_parallel_size": 2},
        ["--pipeline-model-parallel-layout", "Ettt|ttL"],
    ),
}


@pytest.mark.parametrize(("family", "given", "words"), WORDS.values(), ids=WORDS.keys())
def test_what_megatron_is_told(family, given, words):
    args = namespace(**given)
    assert flags.words_for_megatron(args, family) == words
    checked = namespace(position_embedding_type="none")
    flags.restore(checked, args)
    expected = "relative" if args.position_embedding_type == "relative" else "none"
    assert checked.position_embedding_type == expected


@pytest.mark.parametrize("given", ["", "3,x", "3,0,1", "3;1", "automatic"])
def test_layers_per_stage_are_numbers(given):
    with pytest.raises(ConfigError, match=f"expected --dynapipe-layers-per-stage as 5,3, auto or equal, got '{given}'"):
        flags.layers_per_stage(namespace(dynapipe_layers_per_stage=given))


def test_layers_of_one_stage():
    assert flags.layers_per_stage(namespace(dynapipe_layers_per_stage="3")) == (3,)


def test_a_gpts_split_is_given_once():
    args = namespace(dynapipe_layers_per_stage="3,1", pipeline_model_parallel_layout="Ett|ttL")
    expected = "expected --dynapipe-layers-per-stage 3,1 or --pipeline-model-parallel-layout Ett|ttL, got both"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        flags.words_for_megatron(args, ModelFamily.GPT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_model_parallel_layout", "Ett|ttL"),
        ("num_layers_per_virtual_pipeline_stage", 1),
        ("num_virtual_stages_per_pipeline_rank", 2),
        ("decoder_first_pipeline_num_layers", 1),
        ("account_for_loss_in_pipeline_split", True),
        ("dynapipe_layer_to_device", "0,0,0,1"),
        ("num_layers", 4),
    ],
)
def test_a_planned_split_gives_way_to_flags_that_say_more(name, value):
    others = dict.fromkeys(
        ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "dynapipe_layer_to_device")
    )
    whole = dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False)
    args = namespace(dynapipe_layers_per_stage="auto", **others | whole)
    setattr(args, name, value)
    expected = None if name == "num_layers" else f"--{name.replace('_', '-')} {value}"
    assert flags.obstacle_to_auto(args) == expected
