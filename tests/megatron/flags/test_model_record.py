"""What a checkpoint keeps of a model: every field of the installed Megatron's configuration, less those of a list."""

import argparse
import ast
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

from megatron_dynapipe.megatron.flags.model_record import ARGUMENTS, HARMLESS, OF_WEIGHTS, TRAINING, model_fields
from tests.helpers.processes import run_ranks
from tests.megatron.flags.test_command_line import parse_each

TELLS = {
    "group_query_attention": "num_query_groups",
    "use_rotary_position_embeddings": "position_embedding_type",
    "add_position_embedding": "position_embedding_type",
    "squared_relu": "activation_func",
    "quick_geglu": "activation_func",
    "swiglu": "activation_func",
    "encoder_num_layers": "num_layers",
    "num_experts": "num_moe_experts",
}
"""Arguments that a field of the record tells."""
NO_MODEL = {
    "make_vocab_size_divisible_by": "the vocabulary's size is in the record",
    "openai_gelu": "megatron-core does not look at it",
    "onnx_safe": "megatron-core does not look at it",
    "bert_binary_head": "it is for BERT",
    "moe_use_upcycling": "it is refused",
    "moe_upcycling_granularity": "it goes with the one above",
}
GROUPS = ("transformer configuration", "network size", "moe", "heterogeneous architecture")
"""Of Megatron's arguments, those that say what a model is."""


def of_megatron(rank: int = 0, world_size: int = 1) -> tuple[list[str], list[str]]:
    """The fields of the installed Megatron's configuration, and its arguments of models."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    groups = [group for group in parser._action_groups if group.title in GROUPS]
    assert len(groups) == len(GROUPS)
    arguments = [action.dest for group in groups for action in group._group_actions]
    return [field.name for field in dataclasses.fields(MLATransformerConfig)], arguments


def test_the_tables_are_those_of_the_installed_megatron() -> None:
    """A new field of its configuration is compared; a new argument beside it fails here until someone decides."""
    fields, arguments = run_ranks(of_megatron, 1)[0]
    assert set(HARMLESS) | set(TRAINING) <= set(fields), "names that Megatron does not have"
    assert [name for name, times in Counter([*HARMLESS, *TRAINING, *ARGUMENTS]).items() if times > 1] == []
    assert set(OF_WEIGHTS) <= {*fields, *ARGUMENTS, "family", "vocabulary_size", "max_position_embeddings"}
    known = {*fields, *ARGUMENTS, *TELLS, *NO_MODEL, "max_position_embeddings"}
    assert sorted(set(arguments) - known) == [], "add them to ARGUMENTS, or say here what tells them"


def relu(x: float) -> float:
    return max(x, 0)


@dataclasses.dataclass
class Newer:
    """A configuration with fields that no table knows."""

    attention_of_tomorrow: bool = False
    heads_of_tomorrow: list[int] = dataclasses.field(default_factory=list)
    activation_func: object = None
    hidden_dropout: float = 0.1
    persist_layer_norm: bool = False


def test_a_field_that_no_table_knows_is_compared() -> None:
    args = argparse.Namespace(position_embedding_type="rope")
    changed = Newer(attention_of_tomorrow=True, activation_func=functools.partial(relu, x=1), hidden_dropout=0)
    assert model_fields(changed, args) == {
        "attention_of_tomorrow": "True",
        "activation_func": "relu x=1",
        "position_embedding_type": "rope",
    }
    assert model_fields(Newer(persist_layer_norm=True), args) == {"position_embedding_type": "rope"}


EXPERTS = "--num-experts 4 --disable-bias-linear"
ROPE = "--position-embedding-type rope"
CHANGES = {
    "--norm-epsilon 1e-3": ("", "layernorm_epsilon"),
    "--squared-relu": ("", "activation_func"),
    "--dynapipe-activation gelu_tanh": ("", "activation_func"),
    "--dynapipe-softmax-scale 1": ("", "softmax_scale"),
    "--moe-router-topk 3": (EXPERTS, "moe_router_topk"),
    "--moe-router-pre-softmax": (EXPERTS, "moe_router_pre_softmax"),
    "--moe-router-topk-scaling-factor 2.5 --moe-router-pre-softmax": (
        f"{EXPERTS} --moe-router-pre-softmax",
        "moe_router_topk_scaling_factor",
    ),
    "--moe-router-score-function sigmoid": (EXPERTS, "moe_router_score_function"),
    "--rotary-base 500000": (ROPE, "rotary_base"),
    "--rotary-percent 0.5": (ROPE, "rotary_percent"),
    "--rotary-interleaved": (ROPE, "rotary_interleaved"),
    "--rotary-seq-len-interpolation-factor 2": (ROPE, "rotary_seq_len_interpolation_factor"),
    "--use-rope-scaling": (ROPE, "use_rope_scaling"),
    "--use-rope-scaling --rope-scaling-factor 4": (f"{ROPE} --use-rope-scaling", "rope_scaling_factor"),
}
"""By flags that make another model: those of the model that was saved, and the field that tells them apart."""
SAME = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    " --sequence-parallel --use-distributed-optimizer",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--hidden-dropout 0.1 --attention-dropout 0.1 --bf16 --init-method-std 0.5 --no-rope-fusion --seed 8",
    "--dynapipe-attention megatron --attention-softmax-in-fp32 --lr 1e-2 --global-batch-size 32",
)
"""Flags of the same model."""


def records(cases: list[str], data: str, name: str = "model", ranks: int = 1) -> Iterator[dict[str, str]]:
    lines = [("gpt", f"{flags} --train-iters 2") for flags in cases]
    arguments = {"data": data, "cases": lines, "ranks": ranks, "read": [f"checkpoints.{name}"] * len(cases)}
    for text in run_ranks(parse_each, 1, arguments)[0]:
        yield ast.literal_eval(text)


def test_flags_that_make_another_model_are_told_by_their_fields(data) -> None:
    saved = records([before for before, _ in CHANGES.values()], str(data))
    resumed = records([f"{before} {flags}" for flags, (before, _) in CHANGES.items()], str(data))
    for (flags, (_, field)), old, new in zip(CHANGES.items(), saved, resumed, strict=True):
        assert {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} == {field}, flags


def test_flags_of_the_same_model_are_not(data) -> None:
    (saved,) = records([""], str(data))
    assert all(model == saved for model in records(list(SAME), str(data), ranks=4))


def test_flags_of_training_are_kept_apart(data) -> None:
    (training,) = records([f"{EXPERTS} --hidden-dropout 0.2 --moe-z-loss-coeff 1e-3 --bf16"], str(data), "training")
    assert {"hidden_dropout": "0.2", "moe_z_loss_coeff": "0.001", "bf16": "True"}.items() <= training.items()
