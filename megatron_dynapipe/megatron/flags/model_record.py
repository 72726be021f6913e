"""A model's computation, field by field as text: a checkpoint keeps it, so that no other model goes on from it.

Every field of Megatron's configuration is compared unless a table below says why not, so that one which a new Megatron
brings is compared, too. Fields at their defaults are left out: versions with more fields compare equal.
"""

import argparse
import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_dynapipe.costing.pattern import without_stages

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ARGUMENTS = (
    "decoder_num_layers", "untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base",
    "rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "relative_attention_num_buckets", "relative_attention_max_distance",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "hybrid_layer_pattern", "spec",
)  # fmt: skip
"""Megatron's arguments, by destination, of a model that are no fields of its configuration."""

OF_WEIGHTS = (
    "family", "vocabulary_size", "num_layers", "decoder_num_layers", "hybrid_layer_pattern", "hidden_size",
    "ffn_hidden_size", "kv_channels", "num_attention_heads", "num_query_groups", "add_bias_linear", "add_qkv_bias",
    "gated_linear_unit", "normalization", "qk_layernorm", "attention_output_gate", "softmax_type",
    "multi_latent_attention", "position_embedding_type", "max_position_embeddings",
    "relative_attention_num_buckets", "untie_embeddings_and_output_weights", "num_moe_experts", "moe_layer_freq",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "moe_router_enable_expert_bias",
)  # fmt: skip
"""Arguments that decide which weights there are: --finetune, which takes any other change, would not load them."""

GPT_TO_HYBRID = {"num_layers", "hybrid_layer_pattern", "moe_layer_freq"}
"""The fields of them that differ where a GPT's checkpoint becomes a HybridModel of the same modules."""

TRAINING = (
    "hidden_dropout", "attention_dropout", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_router_bias_update_rate", "fp16", "bf16", "fp32_residual_connection", "fp8", "fp4",
    "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "disable_bf16_reduced_precision_matmul",
    "moe_router_dtype",
)  # fmt: skip
"""Fields that say how the same model is trained, or in which precision: a change is named, and training goes on."""

_HARMLESS: Mapping[str, str] = {
    "how ranks divide the model": (
        "tensor_model_parallel_size tensor_parallel_num_weight_shards gtp_weight_remat_size sequence_parallel"
        " pipeline_model_parallel_size virtual_pipeline_model_parallel_size pipeline_model_parallel_layout"
        " num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split"
        " account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage context_parallel_size cp_comm_type"
        " hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank"
        " expert_model_parallel_size expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards"
        " expert_gtp_weight_remat_size moe_token_dispatcher_type"
    ),
    "how ranks exchange messages": (
        "pipeline_model_parallel_comm_backend pipeline_dtype overlap_p2p_comm batch_p2p_comm batch_p2p_sync"
        " use_ring_exchange_p2p overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs variable_seq_lengths"
        " tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs"
        " tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs"
        " tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend"
    ),
    "kernels of the same function": (
        "transformer_impl attention_backend flash_attention_version deterministic_mode batch_invariant_mode"
        " gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl bias_activation_fusion"
        " masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion"
        " fused_single_qkv_rope fused_residual_rmsnorm use_fused_weighted_squared_relu use_transformer_engine_op_fuser"
        " use_te_activation_func use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert moe_grouped_gemm"
        " moe_permute_fusion moe_router_fusion clone_scatter_output_in_embedding mlp_chunks_for_training"
    ),
    "what is computed twice": (
        "recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations"
        " moe_layer_recompute"
    ),
    "the beginning of weights, which a checkpoint has": (
        "init_method output_layer_init_method embedding_init_method init_method_std embedding_init_method_std"
        " perform_initialization use_cpu_initialization init_model_with_meta_device"
    ),
    "the type that follows from fp16 and bf16": "params_dtype autocast_dtype enable_autocast",
    "what Megatron's loop sets": (
        "timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func"
        " grad_sync_func param_sync_func"
    ),
    "logs, tests and inference": (
        "barrier_with_L1_time config_logger_dir test_mode moe_per_layer_logging inference_sampling_seed"
        " use_te_rng_tracker inference_rng_tracker"
    ),
    "the same in every planned run": "calculate_per_token_loss cuda_graph_modules inference_cuda_graph_scope",
}
HARMLESS = {field: reason for reason, fields in _HARMLESS.items() for field in fields.split()}
"""Fields that a resumed run may change without a word, each with what it is."""


def model_fields(config: "TransformerConfig", args: argparse.Namespace) -> dict[str, str]:
    """The fields that make it this model: values other than Megatron's defaults, without the tables' above."""
    fields = {name: value for name, value in _changed(config) if name not in {*HARMLESS, *TRAINING}}
    names = [*ARGUMENTS, *(["max_position_embeddings"] if args.position_embedding_type == "learned_absolute" else [])]
    values = {name: getattr(args, name, None) for name in names}
    if pattern := values["hybrid_layer_pattern"]:
        values["hybrid_layer_pattern"] = without_stages(pattern)
    return fields | {name: str(value) for name, value in values.items() if value not in (None, False)}


def training_fields(config: "TransformerConfig") -> dict[str, str]:
    """How it is trained, as far as the model's configuration says so."""
    return {name: _text(getattr(config, name)) for name in TRAINING if hasattr(config, name)}


def _changed(config: "TransformerConfig") -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(config):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if (value := getattr(config, field.name)) != default:
            yield field.name, _text(value)


def _text(value: object) -> str:
    """The same in every process: functions by their names, not their addresses."""
    if isinstance(value, functools.partial):
        return f"{_text(value.func)} {', '.join(f'{name}={value}' for name, value in value.keywords.items())}"
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__qualname__", None) or str(value)
