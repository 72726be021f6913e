"""Model providers for Megatron's `pretrain`.

A provider is called once per stage as `provider(pre_process=…, post_process=…, vp_stage=…, config=…, pg_collection=…)`
and returns the plain module; Megatron wraps it. The arguments are handed in, not fetched: `get_args()` has one caller.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.integration.models.t5_stage import T5Stage

ModelProvider = Callable[..., Any]


def t5_split(args: Namespace, layers_per_stage: Sequence[int] | None = None) -> T5Split:
    """How Megatron's arguments cut a T5: `--encoder-num-layers`, `--decoder-num-layers` over the pipeline.

    Args:
        args: Megatron's arguments; without `--decoder-num-layers` both stacks are `--num-layers` deep.
        layers_per_stage: layers of each stage in model order; equal if None.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    decoder_layers = args.decoder_num_layers or args.encoder_num_layers
    return T5Split.of(args.encoder_num_layers, decoder_layers, args.pipeline_model_parallel_size, layers_per_stage)


def t5_provider(args: Namespace, split: T5Split) -> ModelProvider:
    """A provider of T5 stages; pass `split.embedding_ranks` and `split.position_embedding_ranks` to `pretrain` too.

    Raises:
        ConfigError: an option that a staged T5 does not have.
    """
    check_t5_arguments(args)

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> T5Stage:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        return T5Stage(
            config or core_transformer_config_from_args(args),
            split=split,
            stage=groups.pp.rank(),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pg_collection=groups,
        )

    return provide


def check_t5_arguments(args: Namespace) -> None:
    """Refuse what a staged T5 does not have.

    Raises:
        ConfigError: naming the option, and what to give instead.
    """
    refused = (
        (args.transformer_impl != "local", "--transformer-impl local", f"--transformer-impl {args.transformer_impl}"),
        (
            args.position_embedding_type != "learned_absolute",
            "--position-embedding-type learned_absolute",
            args.position_embedding_type,
        ),
        (args.untie_embeddings_and_output_weights, "tied embeddings", "--untie-embeddings-and-output-weights"),
        (args.sequence_parallel, "no sequence parallelism", "--sequence-parallel"),
        (args.virtual_pipeline_model_parallel_size is not None, "one stage per rank", "virtual pipeline stages"),
        (args.apply_query_key_layer_scaling, "no scaling by layer", "--apply-query-key-layer-scaling"),
    )
    for is_refused, expected, given in refused:
        if is_refused:
            raise ConfigError(f"a T5 cut into stages expects {expected}, got {given}")


def gpt_provider(args: Namespace) -> ModelProvider:
    """A provider of Megatron's own `GPTModel`, with Megatron's local layers or Transformer Engine's."""

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> GPTModel:
        return GPTModel(
            config=config or core_transformer_config_from_args(args),
            transformer_layer_spec=gpt_layer(args),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )

    return provide


def gpt_layer(args: Namespace) -> ModuleSpec:
    """One layer of a GPT, as `--transformer-impl` asks.

    Raises:
        ConfigError: mixtures of experts, which the planner's cost models do not know.
    """
    if args.num_experts:
        raise ConfigError(f"expected a dense model, got --num-experts {args.num_experts}")
    layer = get_gpt_layer_local_spec if args.transformer_impl == "local" else get_gpt_layer_with_transformer_engine_spec
    if args.transformer_impl == "local":
        return layer(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return layer(qk_layernorm=args.qk_layernorm)
