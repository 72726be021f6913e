"""From Megatron's namespace, parsed and checked, to a run's configuration: the one place that reads it for ours."""

import argparse
import math
import os
from typing import Any

import msgspec
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe import cpu
from megatron_dynapipe.config import Cluster
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.network import GLOO_RULES, cuda_rules
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, ModelFamily
from megatron_dynapipe.costing import (
    ModelShape,
    Network,
    ScatterGather,
    model_of_layers,
)
from megatron_dynapipe.costing.pattern import without_stages
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.flags import layer_split, machine
from megatron_dynapipe.megatron.flags.batch_layout import (
    Backward,
    Layouts,
    batch_layouts,
    context_teams,
    describe,
    schedule,
    slices,
    split_backward,
)
from megatron_dynapipe.megatron.flags.checks import maximum_lengths, recompute_modes
from megatron_dynapipe.megatron.flags.run_config import RunConfig, Sources
from megatron_dynapipe.megatron.hooks.fused_kernels import optimizer_in_words
from megatron_dynapipe.megatron.models.config import planner_fields, transformer_config
from megatron_dynapipe.report import REPORT_FOLDER
from megatron_dynapipe.sampling import LastBatch, LongSamples, SamplerSettings, TruncationSide
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings
from megatron_dynapipe.store import find_address

_FIRST_BATCHES = 16
"""Batches by tokens whose mean number of samples stands for all."""


def run_config(args: argparse.Namespace, family: ModelFamily, device: torch.device | None = None) -> RunConfig:
    """A run's configuration, from Megatron's namespace as checked by `checks` and by Megatron: made once in a start.

    What the start finds out follows from it: `calibration.with_measured_costs`, `RunConfig.with_layers_per_stage`.

    Raises:
        ConfigError: the store's URL or the cluster file cannot be read, or settings of plans do not go together.
        CostModelError: the cost model's file cannot be read, or is of another model.
        DataError: the dataset is missing or damaged.
    """
    if device is None:
        # Also before it is current: asking for the current one makes a context on GPU 0.
        device = torch.device("cpu") if cpu.is_enabled() else torch.device("cuda", int(args.local_rank or 0))
    cluster = machine.cluster_of(args.dynapipe_cluster, device=device)
    layouts = batch_layouts(args, on_cpu=device.type == "cpu")
    backward = split_backward(args)
    transformer = transformer_config(args)
    shape = ModelShape.of_megatron(vars(args), family, on_cpu=device.type == "cpu")
    costs = machine.costs_of(args, shape, device)
    network = machine.network(costs.load().links, cluster)
    return RunConfig(
        args=args,
        transformer=transformer,
        shape=shape,
        inputs=PlanInputs(
            data_folder=str(args.dynapipe_data),
            splits=_splits(args, family),
            planner=_planner(args, transformer, shape, layouts, backward, network, cluster, device),
            costs=costs,
        ),
        files=read_meta(args.dynapipe_data).files,
        device=device,
        sources=Sources(
            loss_on=None if args.dynapipe_loss is None else LossOn(args.dynapipe_loss),
            store=find_address(args.dynapipe_store_url_file, os.environ),
            store_bind=args.dynapipe_store_bind,
            planner_cores=args.dynapipe_planner_cores,
            ahead=args.dynapipe_lookahead,
            timeout_s=args.dynapipe_timeout_s,
            report_folder=args.dynapipe_report_dir or REPORT_FOLDER,
        ),
        notes=_notes(args, cluster, layouts, backward),
    )


def _notes(args: argparse.Namespace, cluster: Cluster | None, layouts: Layouts, backward: Backward) -> tuple[str, ...]:
    """Lines of the log on the settings, for the run's start."""
    notes = [] if cluster is None else [f"cluster: {machine.describe(cluster)}"]
    notes.append(f"layout of micro-batches: {describe(layouts)}")
    notes.append(f"optimizer: {optimizer_in_words(args.optimizer)}")
    evaluates = bool(args.eval_iters or args.full_validation)
    if evaluates and not read_meta(args.dynapipe_data).split_samples["test"]:
        notes.append("test: the dataset has no samples for it: there is no test at the end")
    if whole_because := backward[1]:
        notes.append(f"backward passes: whole ({whole_because})")
    return tuple(notes)


def _labels_reach_experts(args: argparse.Namespace) -> bool:
    """Whether there are experts, and their routers do nothing that asks for positions without a label."""
    kinds = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    balances = kinds not in ("none", ["none"]) and (
        any(coefficients) if isinstance(coefficients, list) else coefficients
    )
    return bool(args.num_experts) and not (balances or args.moe_z_loss_coeff or args.moe_router_enable_expert_bias)


def _planner(
    args: argparse.Namespace,
    transformer: TransformerConfig,
    shape: ModelShape,
    layouts: Layouts,
    backward: Backward,
    network: Network,
    cluster: Cluster | None,
    device: torch.device,
) -> PlannerSettings:
    stacks = model_of_layers(
        shape.family,
        *layer_split.layers_of_stacks(args, shape.family),
        expert_layers=shape.experts.layers if shape.experts else (),
        pattern=without_stages(args.hybrid_layer_pattern or ""),
    )
    split = layer_split.layers_per_stage(args, shape.family, None if shape.family.is_encoder_decoder else transformer)
    limit_mb = args.dynapipe_device_memory_limit
    on_cpu = device.type == "cpu"
    limit_bytes = None if limit_mb is None else int(limit_mb * BYTES_PER_MB)
    return PlannerSettings(
        **planner_fields(transformer),
        model=stacks,
        data_parallel=args.data_parallel_size,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        modules_per_stage=None if split is None else stacks.modules_of(split),
        memory_limit_bytes=limit_bytes or machine.device_memory_bytes(cluster, on_cpu=on_cpu),
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=recompute_modes(args),
        network=network,
        scatter_gather=ScatterGather(args.dynapipe_scatter_gather),
        micro_batch_layouts=layouts[0],
        slices=slices(args, shape.family, layouts),
        context_teams=context_teams(args),
        schedule=schedule(args),
        label_experts=_labels_reach_experts(args),
        expert_imbalance=args.dynapipe_expert_imbalance,
        split_backward=backward[0],
        transfers=GLOO_RULES if on_cpu else cuda_rules(os.environ),
    )


def _splits(args: argparse.Namespace, family: ModelFamily) -> tuple[SplitSettings, ...]:
    """Train, and with evaluation valid and, if the dataset has samples for it, test, of a run that begins.

    Raises:
        DataError: the dataset is missing or damaged, or has no samples for validation.
    """
    in_samples = (args.train_samples or 0) // args.global_batch_size  # as Megatron counts them
    train = SplitSettings(
        name="train", sampler=training_sampler(args, family), iterations=args.train_iters or in_samples
    )
    if not (args.eval_iters or args.full_validation):
        return (train,)
    sampler = _sampler(args, family, args.eval_global_batch_size)
    once = msgspec.structs.replace(sampler, last_batch=LastBatch.KEEP, epochs=1)
    there = read_meta(args.dynapipe_data).split_samples
    if not there["valid"]:
        raise DataError(
            f"expected samples for validation in {args.dynapipe_data}, its valid split has none",
            hint="train with --eval-iters 0, or prepare the dataset with a --valid-fraction above 0",
        )
    splits = [SplitSettings(name=name, sampler=once, evaluation=1) for name in ("valid", "test") if there[name]]
    counts = [split_sampler(args.dynapipe_data, split).batches.count or 1 for split in splits]
    most = max(counts) if args.full_validation else args.eval_iters
    # Megatron's own loop runs equally many of both.
    counts = [min(max(counts) if args.use_dynapipe else count, most) for count in counts]
    evaluated = [
        msgspec.structs.replace(split, evaluation=count, iterations=count if split.name == "test" else None)
        for split, count in zip(splits, counts, strict=True)
    ]
    return (train, *evaluated)


def training_sampler(args: argparse.Namespace, family: ModelFamily) -> SamplerSettings:
    """The sampler's settings for training iterations: the flags, and the dataset's mixture."""
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


def nominal_batch(args: argparse.Namespace, family: ModelFamily) -> int:
    """The samples of a batch by tokens, by which Megatron counts where no flag says how many: a power of two, about
    their mean over the first batches, times what makes it a multiple of the replicas. Another layout has the same.

    Raises:
        ConfigError, DataError: as `training_sampler` and its samples.
    """
    sampler = msgspec.structs.replace(
        _sampler(args, family, 1), tokens_per_iteration=args.tokens_per_global_batch, labels=False
    )
    batches = split_sampler(args.dynapipe_data, SplitSettings(name="train", sampler=sampler)).batches
    mean = batches.bounds(_FIRST_BATCHES - 1)[1] / _FIRST_BATCHES
    replicas = machine.world_size() // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    return math.lcm(2 ** max(int(math.log2(mean)), 0), max(replicas, 1))


def _sampler(args: argparse.Namespace, family: ModelFamily, samples: int) -> SamplerSettings:
    longest_input, longest_target = maximum_lengths(args, family)
    meta, long = read_meta(args.dynapipe_data), LongSamples(args.dynapipe_long_samples)
    side = args.dynapipe_truncate if long is LongSamples.TRUNCATE else TruncationSide.RIGHT
    loss_on = args.dynapipe_loss or meta.loss
    return SamplerSettings(
        family=family,
        seed=args.seed,
        samples_per_iteration=samples,
        max_input_length=longest_input,
        max_target_length=longest_target,
        long_samples=long,
        sides=meta.task_sides if side is None else (TruncationSide(side),),
        labels=not family.is_encoder_decoder and LossOn(loss_on) is LossOn.TARGETS,
    )
