"""Model providers for Megatron's `pretrain`.

A provider is called once per chunk as `provider(pre_process=…, post_process=…, vp_stage=…, config=…, pg_collection=…)`
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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.data.collate import RequiredFields
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models.activation import model_config
from megatron_dynapipe.integration.models.flags import layers_per_stage
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.integration.models.norms import local_norm
from megatron_dynapipe.integration.models.positions import T5_POSITIONS, Positions
from megatron_dynapipe.integration.models.specs import HAVE_TRANSFORMER_ENGINE, CoreAttention, local_layer
from megatron_dynapipe.integration.models.t5_stage import T5Options, T5Stage, share_weights

ModelProvider = Callable[..., Any]


def t5_split(args: Namespace, split: Sequence[int] | None = None) -> T5Split:
    """How Megatron's arguments cut a T5: `--encoder-num-layers`, `--decoder-num-layers` over the pipeline.

    Args:
        args: Megatron's arguments; without `--decoder-num-layers` both stacks are equally deep.
        split: layers of each virtual stage in model order; those of `--dynapipe-layers-per-stage` if None.

    Raises:
        ConfigError: the layers cannot be split so.
    """
    return T5Split.of(
        args.encoder_num_layers,
        args.decoder_num_layers or args.encoder_num_layers,
        args.pipeline_model_parallel_size,
        split or layers_per_stage(args),
        chunks=args.virtual_pipeline_model_parallel_size or 1,
    )


def t5_required_fields(split: T5Split, rank: int) -> RequiredFields:
    """Which of a micro-batch's tensors the chunks of a pipeline rank read."""
    chunks = split.of_rank(rank)
    return RequiredFields(
        tokens=any(layers.starts_encoder for layers in chunks),
        decoder_tokens=any(layers.starts_decoder for layers in chunks),
        labels=any(layers.ends_decoder for layers in chunks),
    )


def t5_provider(args: Namespace, split: T5Split) -> ModelProvider:
    """A provider of T5 stages; pass `split.embedding_ranks` and `split.position_embedding_ranks` to `pretrain` too.

    Raises:
        ConfigError: an option that a staged T5 does not have.
    """
    check_t5_arguments(args)
    options = t5_options(args)
    built: list[T5Stage] = []

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> T5Stage:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        chunk = vp_stage or 0
        if chunk == 0:
            built.clear()
        stage = T5Stage(
            model_config(args, config),
            split=split,
            stage=groups.pp.rank() + chunk * split.ranks,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            options=options,
            pg_collection=groups,
        )
        built.append(stage)
        if split.chunks > 1 and len(built) == split.chunks:
            share_weights(built)
        return stage

    return provide


def t5_options(args: Namespace) -> T5Options:
    """What Megatron's arguments and ours make a T5 of."""
    return T5Options(
        transformer_engine=args.transformer_impl != "local",
        attention=CoreAttention(args.dynapipe_attention),
        positions=Positions(
            kind=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rotary_interpolation=args.rotary_seq_len_interpolation_factor,
            relative_buckets=args.relative_attention_num_buckets,
            relative_max_distance=args.relative_attention_max_distance,
        ),
        tied=not args.untie_embeddings_and_output_weights,
    )


def check_t5_arguments(args: Namespace) -> None:
    """Refuse what a staged T5 does not have.

    Raises:
        ConfigError: naming the option, and what to give instead.
    """
    local = args.transformer_impl == "local"
    refused = (
        (
            not local and not HAVE_TRANSFORMER_ENGINE,
            "--transformer-impl local (Transformer Engine is not installed)",
            f"--transformer-impl {args.transformer_impl}",
        ),
        (
            args.position_embedding_type not in T5_POSITIONS,
            f"--position-embedding-type {', '.join(T5_POSITIONS[:-1])} or {T5_POSITIONS[-1]}",
            args.position_embedding_type,
        ),
        (
            args.position_embedding_type == "relative" and local and args.dynapipe_attention != "sdpa",
            "--dynapipe-attention sdpa with relative positions",
            f"--dynapipe-attention {args.dynapipe_attention}",
        ),
        (args.apply_query_key_layer_scaling, "no scaling by layer", "--apply-query-key-layer-scaling"),
    )
    for is_refused, expected, given in refused:
        if is_refused:
            raise ConfigError(f"a T5 cut into stages expects {expected}, got {given}")


def gpt_provider(args: Namespace) -> ModelProvider:
    """A provider of Megatron's own `GPTModel`, with Megatron's local layers or Transformer Engine's.

    Raises:
        ConfigError: relative positions, which Megatron's `GPTModel` does not have.
    """
    if args.position_embedding_type == "relative":
        raise ConfigError(
            "Megatron's GPT has no relative positions", hint="use --position-embedding-type rope or learned_absolute"
        )

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> GPTModel:
        config = model_config(args, config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        layer: Any = gpt_layer(args)
        if args.transformer_impl == "local":
            layers = get_num_layers_to_build(config, vp_stage, groups.pp.rank())
            layer = TransformerBlockSubmodules([layer] * layers, layer_norm=_norm(args))
        return GPTModel(
            config=config,
            transformer_layer_spec=layer,
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
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            pg_collection=groups,
            vp_stage=vp_stage,
        )

    return provide


def gpt_layer(args: Namespace) -> ModuleSpec:
    """One layer of a GPT, as `--transformer-impl` and `--dynapipe-attention` ask.

    Raises:
        ConfigError: mixtures of experts, which the planner's cost models do not know.
    """
    if args.num_experts:
        raise ConfigError(f"expected a dense model, got --num-experts {args.num_experts}")
    if args.transformer_impl != "local":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return local_layer(layer, _norm(args), CoreAttention(args.dynapipe_attention))


def gpt_takes_mask(args: Namespace) -> bool:
    """Whether a GPT's attention needs a causal mask; other attentions are causal by themselves, and faster without."""
    return bool(args.transformer_impl == "local" and args.dynapipe_attention == "megatron")


def _norm(args: Namespace) -> Any:
    return local_norm(
        normalization=args.normalization,
        sequence_parallel=args.sequence_parallel,
        fp32_residual=args.fp32_residual_connection,
    )
