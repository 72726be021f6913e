"""From Megatron's arguments to the planner's inputs: model, layout, memory, splits, costs."""

import argparse
import os
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.cost import A100_RATES, CPU_RATES, DeviceRates, ModelShape, Network, even_split
from megatron_dynapipe.cost.analytic import rates_of
from megatron_dynapipe.cost.format import read_file
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import placement, sampling
from megatron_dynapipe.integration.flags.arguments import RunSettings, maximum_lengths
from megatron_dynapipe.integration.flags.batch_layout import batch_layouts
from megatron_dynapipe.integration.flags.clusters import Cluster, cluster_of
from megatron_dynapipe.integration.flags.layer_split import gpt_layers_per_stage
from megatron_dynapipe.integration.flags.shape_buckets import shape_buckets
from megatron_dynapipe.integration.flags.transfer_rules import transfer_rules
from megatron_dynapipe.integration.models import flags as model_flags
from megatron_dynapipe.planning.layer_split import BATCHES, choose_layer_split
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.settings import AnalyticCosts, CostFile, PlanInputs, SplitSettings
from megatron_dynapipe.service.source import split_sampler
from megatron_dynapipe.units import ModelFamily

_MOST_BY_TOKENS = 4096
"""Samples of a micro-batch at most, where an iteration holds any number of them."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that plans may use where no limit is given; the rest is for the allocator's
fragments, communication buffers and kernels' workspaces."""


def state_dtype(args: argparse.Namespace) -> torch.dtype:
    """Type of the states that cross stage boundaries: that of Megatron's `pipeline_dtype`."""
    dtype: torch.dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype
    return dtype


def plan_inputs(args: argparse.Namespace, settings: RunSettings, family: ModelFamily, *, on_cpu: bool) -> PlanInputs:
    """Everything plans are made from, the same on every rank."""
    return PlanInputs(
        data_folder=str(settings.data),
        splits=_splits(args, settings, family),
        planner=_planner(args, settings, family, _layers_per_stage(args, family), on_cpu=on_cpu),
        costs=_costs(args, settings, family, on_cpu=on_cpu),
        recalibrate=settings.recalibrate,
    )


def preview_inputs(args: argparse.Namespace, settings: RunSettings, family: ModelFamily, *, on_cpu: bool) -> PlanInputs:
    """`plan_inputs` before Megatron is initialised: of a run that starts anew."""
    started = argparse.Namespace(**vars(args) | {"iteration": 0, "consumed_valid_samples": 0})
    return plan_inputs(started, settings, family, on_cpu=on_cpu)


def _splits(args: argparse.Namespace, settings: RunSettings, family: ModelFamily) -> tuple[SplitSettings, ...]:
    """Train, and with evaluation valid and test; a resumed run continues from Megatron's counters."""
    train = SplitSettings(
        name="train",
        sampler=_training_sampler(args, settings, family),
        first_iteration=args.iteration,
        iterations=max(args.train_iters - args.iteration, 0),
    )
    if not args.eval_iters:
        return (train,)
    evaluation = _sampler(args, settings, family, args.eval_global_batch_size)
    valid = SplitSettings(
        name="valid",
        sampler=evaluation,
        first_iteration=args.consumed_valid_samples // args.eval_global_batch_size,
        forward_only=True,
    )
    test = SplitSettings(name="test", sampler=evaluation, iterations=args.eval_iters, forward_only=True)
    return train, valid, test


def _training_sampler(args: argparse.Namespace, settings: RunSettings, family: ModelFamily) -> SamplerSettings:
    return sampling.of_training(args, _sampler(args, settings, family, args.global_batch_size))


def train_iterations(args: argparse.Namespace, settings: RunSettings, family: ModelFamily) -> int | None:
    """The iterations of `--train-epochs`, None where it is not given; raises as `sampling.iterations_of_epochs`."""
    return sampling.iterations_of_epochs(args, _sampler(args, settings, family, args.global_batch_size))


def _sampler(args: argparse.Namespace, settings: RunSettings, family: ModelFamily, samples: int) -> SamplerSettings:
    longest_input, longest_target = maximum_lengths(args, family)
    return SamplerSettings(
        family=family,
        seed=args.seed,
        samples_per_iteration=samples,
        max_input_length=longest_input,
        max_target_length=longest_target,
        long_samples=settings.long_samples,
    )


def _planner(
    args: argparse.Namespace,
    settings: RunSettings,
    family: ModelFamily,
    layers_per_stage: tuple[int, ...] | None,
    *,
    on_cpu: bool,
) -> PlannerSettings:
    encoder_layers, decoder_layers = _layers(args, family)
    cluster = cluster_of(args, on_cpu=on_cpu)
    return PlannerSettings(
        family=family,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        hidden_size=args.hidden_size,
        data_parallel=args.data_parallel_size,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        layers_per_stage=layers_per_stage,
        memory_limit_bytes=settings.memory_limit_bytes or device_memory_bytes(cluster, on_cpu=on_cpu),
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=settings.recompute,
        network=network(settings, cluster),
        scatter_gather=settings.scatter_gather,
        micro_batch_layouts=batch_layouts(args, family, on_cpu=on_cpu).allowed,
        partition=settings.partition,
        schedule=settings.schedule,
        element_bytes=state_dtype(args).itemsize,
        transfers=transfer_rules(args, on_cpu=on_cpu),
        buckets=shape_buckets(args),
        sequence_parallel=args.sequence_parallel,
    )


def _layers(args: argparse.Namespace, family: ModelFamily) -> tuple[int, int]:
    """Encoder and decoder layers; a GPT's count as encoder layers."""
    if family is ModelFamily.GPT:
        return args.num_layers, 0
    return args.encoder_num_layers, args.decoder_num_layers or args.encoder_num_layers


def _layers_per_stage(args: argparse.Namespace, family: ModelFamily) -> tuple[int, ...] | None:
    """Layers of each virtual stage as they are built, None where they are split equally."""
    return model_flags.layers_per_stage(args) if family is ModelFamily.T5 else gpt_layers_per_stage(args)


def chosen_layer_split(
    args: argparse.Namespace, settings: RunSettings, family: ModelFamily, *, on_cpu: bool
) -> tuple[int, ...]:
    """The layers per stage under which the run's first iterations are predicted to be fastest, the same on every rank.

    Every sample of the data that fits under the even split fits under the chosen one.

    Raises:
        ConfigError: several chunks per stage, or more stages than layers.
        PlanningError: none of the iterations can be planned.
    """
    sampler = split_sampler(
        settings.data, SplitSettings(name="train", sampler=_training_sampler(args, settings, family))
    )
    count = sampler.batches.count
    batches = [sampler.batch(iteration) for iteration in range(BATCHES if count is None else min(BATCHES, count))]
    whole = SplitSettings(name="train", sampler=_sampler(args, settings, family, sampler.samples_per_epoch))
    epoch = split_sampler(settings.data, whole).batch(0)
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    even = even_split(sum(_layers(args, family)), stages)
    planner = _planner(args, settings, family, even, on_cpu=on_cpu)
    costs = _costs(args, settings, family, on_cpu=on_cpu).load()
    return choose_layer_split(planner, costs, batches, to_fit=[epoch])


def network(settings: RunSettings, cluster: Cluster | None = None) -> Network:
    """Links as the flags give them, else as the cost model's file has measured them, else as the cluster's file says.

    Raises:
        CostModelError: the cost model's file cannot be read.
    """
    known = {} if cluster is None else cluster.links
    measured = {} if settings.cost_model is None else read_file(settings.cost_model)[0].links
    return Network.over(
        {**known, **measured},
        devices_per_node=settings.devices_per_node,
        intra_node_gbps=settings.intra_node_gbps,
        inter_node_gbps=settings.inter_node_gbps,
        intra_node_latency_us=settings.intra_node_latency_us,
        inter_node_latency_us=settings.inter_node_latency_us,
    )


def _costs(
    args: argparse.Namespace, settings: RunSettings, family: ModelFamily, *, on_cpu: bool
) -> CostFile | AnalyticCosts:
    if settings.cost_model is not None:
        return CostFile(path=str(Path(settings.cost_model).absolute()))
    shape = ModelShape(
        family=family,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn=args.ffn_hidden_size,
        vocabulary=args.padded_vocab_size,
    )
    return AnalyticCosts(
        shape=shape,
        rates=_rates(args, on_cpu=on_cpu),
        max_size=max(
            args.global_batch_size, args.eval_global_batch_size, _MOST_BY_TOKENS if args.tokens_per_global_batch else 1
        ),
        max_length=max(args.seq_length, args.decoder_seq_length or 0),
    )


def describe_costs(args: argparse.Namespace, costs: CostFile | AnalyticCosts, *, on_cpu: bool) -> str:
    """Where a run's costs come from, and what they assume, for its log."""
    if isinstance(costs, CostFile):
        return f"{costs.load().name}, from {costs.path}"
    device = _assumed_device(args, on_cpu=on_cpu)
    return (
        f"computed from the model's shape for {device}; to predict this machine, let it be measured"
        " (--dynapipe-calibrate 20, or `megatron-dynapipe profile` and --dynapipe-cost-model), or add"
        " --dynapipe-recalibrate"
    )


def _rates(args: argparse.Namespace, *, on_cpu: bool) -> DeviceRates:
    """Rates of this device by its name, else of a common one: micro-batches follow from them, and times in ms too."""
    rates = CPU_RATES if on_cpu else rates_of(torch.cuda.get_device_name(_device_index(args))) or A100_RATES
    return msgspec.structs.replace(rates, element_bytes=args.params_dtype.itemsize)


def _assumed_device(args: argparse.Namespace, *, on_cpu: bool) -> str:
    """The device that computed costs are for."""
    if on_cpu:
        return "a common server CPU's core (assumed)"
    name = torch.cuda.get_device_name(_device_index(args))
    return name if rates_of(name) else f"an A100 (assumed: {name} is not in the table of devices)"


def _device_index(args: argparse.Namespace) -> int:
    """The GPU of this rank, also before it is current: asking for the current one makes a context on GPU 0."""
    return int(args.local_rank or 0)


def device_memory_bytes(cluster: Cluster | None, *, on_cpu: bool) -> int:
    """Memory that plans may use where no limit is given: what a named cluster file says, else this rank's part of what
    the device's file says, or of a share of the device or the host.

    Raises:
        ConfigError: the host does not say how much memory it has.
    """
    if cluster is not None and not cluster.device:
        return cluster.memory_limit_bytes  # named, as a limit of each rank would be
    if not on_cpu:
        if cluster is None:
            device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * MEMORY_SHARE
        else:
            device = cluster.memory_limit_bytes
        return int(device / placement.ranks_per_device(torch.cuda.device_count()))
    try:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError) as error:
        raise ConfigError(
            "this host does not say how much memory it has", hint="pass --dynapipe-device-memory-limit MB"
        ) from error
    return int(host / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * MEMORY_SHARE)
