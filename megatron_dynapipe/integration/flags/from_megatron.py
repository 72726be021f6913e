"""From Megatron's namespace, parsed and checked, to a run's configuration: the one place that reads it for ours."""

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_dynapipe import cpu
from megatron_dynapipe.cost import Experts, ScatterGather
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.integration.flags import layer_split, machine
from megatron_dynapipe.integration.flags.batch_layout import (
    batch_layouts,
    core_attention,
    slices,
    split_backward,
    undivided_because,
)
from megatron_dynapipe.integration.flags.checks import maximum_lengths, recompute_modes
from megatron_dynapipe.integration.flags.command_line import REPORT_FOLDER
from megatron_dynapipe.integration.flags.model_record import model_fields, training_fields
from megatron_dynapipe.integration.flags.resume_record import CheckpointConfig
from megatron_dynapipe.integration.flags.run_config import ParallelConfig, RunConfig, TrainingConfig
from megatron_dynapipe.integration.models.config import ModelConfig, StateBytes
from megatron_dynapipe.integration.models.positions import Positions
from megatron_dynapipe.sampling import LastBatch, LongSamples, SamplerSettings, TruncationSide
from megatron_dynapipe.service.loop import split_sampler
from megatron_dynapipe.service.settings import SplitSettings
from megatron_dynapipe.store import find_address
from megatron_dynapipe.units import BYTES_PER_MB, ModelFamily

_LAYER_COSTS = (
    *("hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "num_query_groups", "swiglu"),
    "dynapipe_activation",
    *("seq_length", "decoder_seq_length", "max_position_embeddings", "padded_vocab_size", "global_batch_size"),
    *("normalization", "position_embedding_type", "add_bias_linear", "untie_embeddings_and_output_weights"),
    *("tensor_model_parallel_size", "sequence_parallel", "params_dtype", "transformer_impl", "dynapipe_attention"),
    *("attention_dropout", "hidden_dropout", "accumulate_allreduce_grads_in_fp32", "attention_backend"),
)
"""Those that layers' costs depend on."""


def run_config(args: argparse.Namespace, family: ModelFamily) -> RunConfig:
    """A run's configuration, from Megatron's namespace as checked by `checks` and by Megatron.

    Raises:
        ConfigError: the store's URL or the cluster file cannot be read.
        DataError: the dataset is missing or damaged.
    """
    limit_mb, model = args.dynapipe_device_memory_limit, model_config(args, family)
    # Also before it is current: asking for the current one makes a context on GPU 0.
    device = torch.device("cpu") if cpu.is_enabled() else torch.device("cuda", int(args.local_rank or 0))
    return RunConfig(
        model=model,
        parallel=parallel_config(args, family),
        training=_training(args, family),
        state=state_bytes(args),
        checkpoints=_checkpoints(args, model),
        in_checkout=args.use_dynapipe,
        rank=args.rank,
        device=device,
        data=args.dynapipe_data,
        truncate=TruncationSide(args.dynapipe_truncate),
        loss_on=None if args.dynapipe_loss is None else LossOn(args.dynapipe_loss),
        store=find_address(None, args.dynapipe_store_url_file, os.environ),
        store_bind=args.dynapipe_store_bind,
        planners=1 if args.dynapipe_planners is None else args.dynapipe_planners * machine.nodes(),
        ahead=args.dynapipe_lookahead,
        timeout_s=args.dynapipe_timeout_s,
        cost_model=args.dynapipe_cost_model,
        calibrate_s=args.dynapipe_calibrate,
        layer_costs={name: str(getattr(args, name, None)) for name in _LAYER_COSTS},
        cluster=machine.cluster_of(args.dynapipe_cluster, device=device),
        memory_limit_bytes=None if limit_mb is None else int(limit_mb * BYTES_PER_MB),
        reserves_all_memory=args.dynapipe_reserve_all_memory,
        scatter_gather=ScatterGather(args.dynapipe_scatter_gather),
        recompute=recompute_modes(args),
        layouts=(layouts := batch_layouts(args, family, on_cpu=device.type == "cpu")),
        slices=slices(args, family, layouts),
        split_backward=split_backward(args),
        undivided_because=undivided_because(args) if args.dynapipe_split_backward != "off" else "",
        expert_imbalance=args.dynapipe_expert_imbalance,
        plans_layer_split=args.dynapipe_layers_per_stage == layer_split.AUTO,
        report_folder=args.dynapipe_report_dir or REPORT_FOLDER,
        metrics_interval=args.tensorboard_log_interval,
        checks_losses=args.check_for_nan_in_loss_and_grad,
    )


def model_config(args: argparse.Namespace, family: ModelFamily) -> ModelConfig:
    """The model that Megatron's checked arguments describe."""
    is_t5 = family is ModelFamily.T5
    return ModelConfig(
        family=family,
        encoder_layers=args.encoder_num_layers if is_t5 else args.num_layers,
        decoder_layers=(args.decoder_num_layers or args.encoder_num_layers) if is_t5 else 0,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn=args.ffn_hidden_size,
        vocabulary=args.padded_vocab_size or 0,
        max_positions=args.max_position_embeddings,
        longest=max(args.seq_length, args.decoder_seq_length or 0),
        transformer_impl=args.transformer_impl,
        attention=core_attention(args),
        positions=Positions(
            kind=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rotary_interpolation=args.rotary_seq_len_interpolation_factor,
            relative_buckets=args.relative_attention_num_buckets,
            relative_max_distance=args.relative_attention_max_distance,
        ),
        rope_scaling=args.rope_scaling_factor if args.use_rope_scaling else None,
        tied=not args.untie_embeddings_and_output_weights,
        activation=args.dynapipe_activation,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
        sequence_parallel=args.sequence_parallel,
        fp32_residual=args.fp32_residual_connection,
        fp16_cross_entropy=args.fp16_lm_cross_entropy,
        dtype=args.params_dtype,
        gradient_dtype=torch.float32 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype,
        dropout=bool(args.hidden_dropout or args.attention_dropout),
        experts=_experts(args),
        megatron=partial(core_transformer_config_from_args, args),
    )


def state_bytes(args: argparse.Namespace) -> StateBytes:
    """As Megatron's arguments ask: gradients in fp32 or as parameters, Adam's two moments or SGD's one."""
    is_half = args.params_dtype.itemsize < 4
    stage_ranks = args.data_parallel_size * args.tensor_model_parallel_size
    moments = {"adam": 2, "sgd": 1}.get(args.optimizer, 2)
    return StateBytes(
        gradient=4 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize,
        optimizer=4 * (moments + is_half),  # the master copy of half-precision parameters
        optimizer_shards=args.data_parallel_size if args.use_distributed_optimizer else 1,
        expert_shards=stage_ranks // _expert_ranks(args) if args.use_distributed_optimizer else 1,
    )


def _expert_ranks(args: argparse.Namespace) -> int:
    """Neighbouring ranks of a stage that share experts, or tensor-parallel weights: whole replicas."""
    sharing = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return math.lcm(sharing, args.tensor_model_parallel_size)


def _experts(args: argparse.Namespace) -> Experts | None:
    if not args.num_experts:
        return None
    return Experts(
        count=args.num_experts,
        per_token=args.moe_router_topk,
        ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        layers=_expert_layers(args.moe_layer_freq, args.num_layers),
    )


def _expert_layers(frequency: int | list[int], layers: int) -> tuple[int, ...]:
    """Those with experts, as `Experts.layers`."""
    pattern = frequency if isinstance(frequency, list) else [layer % frequency == 0 for layer in range(layers)]
    return () if all(pattern) else tuple(layer for layer, has in enumerate(pattern) if has)


def parallel_config(args: argparse.Namespace, family: ModelFamily) -> ParallelConfig:
    """How Megatron's checked arguments divide the work."""
    layers = layer_split.layers_per_stage(args.dynapipe_layers_per_stage)
    if layers is None and family is ModelFamily.GPT:
        layers = layer_split.gpt_layers_per_stage(args)
    return ParallelConfig(
        data=args.data_parallel_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        experts=args.expert_model_parallel_size,
        in_step=_expert_ranks(args) // args.tensor_model_parallel_size,
        distributed_optimizer=args.use_distributed_optimizer,
        layers_per_stage=layers,
    )


def _training(args: argparse.Namespace, family: ModelFamily) -> TrainingConfig:
    in_samples = (args.train_samples or 0) // args.global_batch_size  # as Megatron counts them
    return TrainingConfig(
        seed=args.seed,
        sampler=training_sampler(args, family),
        iterations=args.train_iters or in_samples,
        evaluation=_sampler(args, family, args.eval_global_batch_size),
        evaluation_iterations=args.eval_iters or 0,
        most_samples=max(args.global_batch_size, args.eval_global_batch_size),
    )


def training_sampler(args: argparse.Namespace, family: ModelFamily) -> SamplerSettings:
    """What decides the samples of training iterations: the flags, and the dataset's mixture."""
    changes: dict[str, Any] = {
        "task_rates": read_meta(args.dynapipe_data).task_rates,
        "tokens_per_iteration": args.tokens_per_global_batch,
        "last_batch": LastBatch(args.dynapipe_last_batch),
        "epochs": args.train_epochs,
    }
    return msgspec.structs.replace(_sampler(args, family, args.global_batch_size), **changes)


def iterations_of_epochs(args: argparse.Namespace, family: ModelFamily) -> int:
    """The iterations of `--train-epochs`.

    Raises:
        ConfigError: an epoch fills no batch.
        DataError: the dataset is missing or damaged.
    """
    settings = SplitSettings(name="train", sampler=training_sampler(args, family))
    count = split_sampler(args.dynapipe_data, settings).batches.count
    assert count is not None, "the stream of epochs ends"
    return count


def _sampler(args: argparse.Namespace, family: ModelFamily, samples: int) -> SamplerSettings:
    longest_input, longest_target = maximum_lengths(args, family)
    return SamplerSettings(
        family=family,
        seed=args.seed,
        samples_per_iteration=samples,
        max_input_length=longest_input,
        max_target_length=longest_target,
        long_samples=LongSamples(args.dynapipe_long_samples),
    )


def _checkpoints(args: argparse.Namespace, model: ModelConfig) -> CheckpointConfig:
    transformer = model.transformer_config()
    folder = getattr(args, "non_persistent_global_ckpt_dir", None)
    kind = getattr(args, "non_persistent_ckpt_type", None)
    tied = args.use_distributed_optimizer and not getattr(args, "dist_ckpt_optim_fully_reshardable", True)
    return CheckpointConfig(
        save=None if args.save is None else Path(args.save),
        load=None if args.load is None else Path(args.load),
        step=getattr(args, "ckpt_step", None),
        non_persistent=kind == "global",
        non_persistent_folder=None if folder is None else Path(folder),
        local_folder=Path(args.non_persistent_local_ckpt_dir, str(args.rank)) if kind == "local" else None,
        one_layout=tied or kind == "local" or args.ckpt_format != "torch_dist",
        pretrained=None if args.pretrained_checkpoint is None else Path(args.pretrained_checkpoint),
        allows_other_data=args.dynapipe_allow_other_data or args.finetune,
        finetunes=args.finetune,
        model=model_fields(transformer, args),
        training=training_fields(transformer),
        tokenizer=Path(str(args.tokenizer_model)),
    )
