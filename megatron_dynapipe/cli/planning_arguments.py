"""The arguments that `plan` and `compare` share, and the planner settings that they make."""

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from megatron_dynapipe.choosing.layer_split import MORE_CHUNKS, TRIALS, choose_layer_split
from megatron_dynapipe.cli import say
from megatron_dynapipe.cli.batch_arguments import add_batch_arguments, given_batches
from megatron_dynapipe.cli.batches import read_batches
from megatron_dynapipe.cli.model_config import (
    adapters_of,
    add_adapter_arguments,
    experts_of,
    given_numbers,
    model_shape,
    take_model_config,
)
from megatron_dynapipe.cli.run_file import SIZES, take_run_file
from megatron_dynapipe.config import Cluster, read_cluster
from megatron_dynapipe.core.costs import LARGEST_COORDINATE
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES, Link
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    AnalyticCostModel,
    CostModel,
    DeviceRates,
    Network,
    ScatterGather,
    TableCostModel,
    even_layer_split,
    model_of_layers,
)
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.costing.file import check_measured_model
from megatron_dynapipe.costing.pattern import check_stages, layer_split_of_pattern
from megatron_dynapipe.megatron.flags.planning_flags import (
    AUTO,
    EQUAL,
    MOST_REAL,
    above_zero,
    add_planning_flags,
    not_negative,
    number,
    positive,
)
from megatron_dynapipe.megatron.flags.planning_flags import defaults as planning_defaults
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.export import megatron_flags

ANALYTIC = "analytic"
"""The `--cost-model` that is no file."""
_DEVICES_PER_NODE = 8
_USUAL_REACH = 16384
"""Positions up to which costs are computed at least, so that batches of usual lengths have the same plans."""


def add_planning_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to plan: lengths, costs, model, parallel layout, memory, links, layer split."""
    add_shared_arguments(parser)
    add = parser.add_argument
    for name in SIZES:
        of_layout = "(default: 1; without any of the four, the layout of the run file of --model-config)"
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=of_layout)
    chunks = (
        "parts of the model on each pipeline rank (virtual stages), which run in turn: so many, or 1, 2 or 4, chosen"
        " with an auto split (default: auto; 1 where layers are not split by auto)"
    )
    add("--virtual-stages", type=lambda n: n if n == AUTO else positive(n), metavar="auto|N", help=chunks)
    shared = "optimizer state shared over replicas (default: as the run file has it)"
    add("--distributed-optimizer", action="store_true", default=None, help=shared)
    other = "other lengths to choose an auto split from, in batches as large as those to plan"
    add("--split-from", type=Path, metavar="BATCHES", help=other)


def add_shared_arguments(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Declare what does not depend on the parallel layout: lengths, costs, model, memory, links, planning flags."""
    add_batch_arguments(parser)
    add = parser.add_argument
    costs = "what layers cost: a file, or computed from the model's shape and a device's rates"
    add("--cost-model", type=Path, required=True, metavar="FILE|analytic", help=costs)
    _add_model_arguments(parser)
    add("--device", metavar="NAME", help="for --cost-model analytic, as CUDA names it (that of --cluster, else A100)")
    cluster = (
        "memory and links, where no flag and no cost model gives them, as training's --dynapipe-cluster; or the "
        "name of one of the package's, such as h100_80gb"
    )
    add("--cluster", type=Path, metavar="FILE", help=cluster)
    settled_later = [name for name in planning_defaults() if name.replace("_", "-") not in without]
    add_planning_flags(parser, without=without)
    parser.set_defaults(**dict.fromkeys(settled_later))
    sequence = (
        "with tensor parallelism (default: as the run file has it; else off in `plan`, and on with computed costs in"
        " `compare` and `tune`)"
    )
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help=sequence)
    parser.set_defaults(usual_split=EQUAL, trials=TRIALS)
    add("--devices-per-node", type=positive, metavar="N", help="(that of --cluster, else 8)")
    _add_transfer_arguments(parser)
    tried = "schedules tried per batch; default: fewer where there are more micro-batches"
    add("--search-evaluations", type=not_negative, metavar="N", help=tried)
    add("--seed", type=int, default=0, metavar="N", help="of the search")
    add("--json", action="store_true", help="print one JSON object")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Declare `--export`."""
    stages = "also print the stages as Megatron's own flags, for its GPTModel (whole layers) and its HybridModel"
    parser.add_argument("--export", choices=("megatron",), help=stages)


def exported(
    args: argparse.Namespace, settings: PlannerSettings, cost_model: CostModel, batches: Sequence[GlobalBatch]
) -> dict[str, object]:
    """The part of a report that `--export` asks for, printed unless all of it is JSON; empty without."""
    if args.export is None:
        return {}
    flags, note = megatron_flags(settings, cost_model, batches)
    if not args.json:
        say(f"Megatron alone: {' '.join(shlex.join(flag) for flag in flags.items())}" + (note and f"\n  {note}"))
    return {"export": {"flags": flags, "note": note}}


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=ModelFamily, choices=tuple(ModelFamily), help="kind of model")
    file = "take all of the model from a run file or a recipe of Megatron-Bridge (.yaml), or a HuggingFace config.json"
    add("--model-config", type=Path, metavar="FILE", help=file)
    parser.set_defaults(pattern="")  # of a HybridModel, which a file alone has
    add("--layers", type=positive, metavar="N", help="layers of a gpt model")
    add("--encoder-layers", type=positive, metavar="N", help="of a t5 model")
    add("--decoder-layers", type=positive, metavar="N", help="of a t5 model")
    add("--hidden-size", type=positive, metavar="N", help="of the model")
    add_adapter_arguments(parser)


def _add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    add_link_arguments(parser)
    starts = (
        "when transfers start: as early as they can, or as in training on GPUs, where receives start right before "
        "their waits and sends of a channel one after another (default: gloo, as the published rules have it)"
    )
    parser.add_argument("--transfers", choices=("gloo", "gpu"), default="gloo", help=starts)


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Links between devices, inside a node and between nodes."""
    for link, gbps, latency_us in (("intra", 4800, 0), ("inter", 100, 4000)):
        default = "(default: the cost model's measured one, else that of --cluster, else %s)"
        parser.add_argument(f"--{link}-node-gbps", type=above_zero, metavar="N", help=default % gbps)
        latency = number(float, 0.0, MOST_REAL)
        parser.add_argument(f"--{link}-node-latency-us", type=latency, metavar="N", help=default % latency_us)


def costs_and_settings(args: argparse.Namespace) -> tuple[CostModel, PlannerSettings]:
    """The cost model and the settings that the arguments ask for, the layer split chosen.

    Raises:
        CostModelError: the cost model cannot be read, or is of another model.
        ConfigError: an argument that does not go with another, or cannot be honoured.
    """
    complete_model(args)
    take_run_file(args)
    cost_model, _ = costs_and_rates(args)
    return cost_model, planner_settings(args, cost_model)


def costs_and_rates(args: argparse.Namespace) -> tuple[CostModel, DeviceRates]:
    """The cost model that completed arguments name, and its device's rates; raises as `costs_and_settings`."""
    if not computes_costs(args):
        if args.device is not None:
            raise ConfigError(f"--device goes with --cost-model {ANALYTIC}, and a file was given")
        tables = TableCostModel.load(args.cost_model)
        check_measured_model(tables.file, given_numbers(args))
        return tables, A100_RATES
    shape = model_shape(args)
    device = args.device or ("A100" if args.cluster is None else args.cluster.stem)
    rates = rates_of(device)
    if rates is None:
        raise ConfigError(
            f"expected a --device whose rates are known, got {device!r}",
            hint="A100, H100, H200, B200, V100, …; or measure costs with `megatron-dynapipe profile`",
        )
    longest = max(n for batch in given_batches(args) for n in (*batch.input, *(batch.target or ())))
    reach = min(max(_USUAL_REACH, 1 << (longest - 1).bit_length()), LARGEST_COORDINATE)
    return AnalyticCostModel(shape, rates, max_length=reach, sequence_parallel=bool(args.sequence_parallel)), rates


def computes_costs(args: argparse.Namespace) -> bool:
    """Whether costs are computed, and not read from a file."""
    return str(args.cost_model) == ANALYTIC


def complete_model(args: argparse.Namespace) -> None:
    """Take the model's sizes from its file, if one was given, and once what else a run file says.

    Raises:
        ConfigError: kind or size are missing, or a value of the file is none.
    """
    if args.model_config is not None:
        take_model_config(args)
    if not hasattr(args, "is_complete"):
        take_run_file(args)
        args.is_complete = True
    if args.model is None:
        raise ConfigError("expected a kind of model, got none", hint="pass --model gpt, or --model-config FILE")
    if args.hidden_size is None:
        raise ConfigError(f"a {args.model} model needs --hidden-size")
    _layers(args)


def planner_settings(args: argparse.Namespace, cost_model: CostModel, *, choose: bool = True) -> PlannerSettings:
    """The settings that the arguments ask for, an auto layer split chosen, or as even as where the choice begins.

    Raises:
        ConfigError: an argument that does not go with another, or cannot be honoured.
        PlanningError: no batch can be planned under the splits to choose among.
    """
    layer_split = args.layers_per_stage
    experts = experts_of(args)
    expert_layers = experts.layers if experts else ()
    model = model_of_layers(args.model, *_layers(args), expert_layers=expert_layers, pattern=args.pattern)
    chunks = 1
    if layer_split != AUTO and (stages := layer_split_of_pattern(args.pattern)) is not None:
        check_stages(args.pattern, stages=args.pipeline_parallel, split=None if layer_split == EQUAL else layer_split)
        layer_split = stages
    if args.virtual_stages != AUTO:
        chunks = args.virtual_stages
    elif not isinstance(layer_split, str):
        chunks = max(len(layer_split) // args.pipeline_parallel, 1)
    if layer_split == AUTO:  # begins even
        layer_split = even_layer_split(model.layers, args.pipeline_parallel * chunks, halves=model.layers_divide)
    search = {name: getattr(args, name, None) for name in ("search_evaluations", "seed")}
    search["method"] = getattr(args, "schedule", None)
    settings = PlannerSettings(
        model=model,
        hidden_size=args.hidden_size,
        data_parallel=args.data_parallel,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        chunks=chunks,
        modules_per_stage=None if layer_split == EQUAL else model.modules_of(layer_split),
        memory_limit_bytes=_memory_limit_bytes(args),
        distributed_optimizer=args.distributed_optimizer,
        sequence_parallel=bool(args.sequence_parallel) and args.tensor_parallel > 1,
        recompute=args.limit_rc_type or _modes(args),
        micro_batch_layouts=tuple(BatchLayout) if args.layout == AUTO else (BatchLayout(args.layout),),
        slices=args.slices,
        context_teams=getattr(args, "context_teams", None) or 1,
        split_backward=args.split_backward,
        expert_parallel=args.expert_parallel,
        expert_imbalance=args.expert_imbalance,
        replicas_in_step=args.expert_parallel,
        network=network_of(args, cost_model.links),
        scatter_gather=ScatterGather(args.scatter_gather),
        schedule=ScheduleSettings(**{name: value for name, value in search.items() if value is not None}),
        transfers=GLOO_RULES if args.transfers == "gloo" else CUDA_RULES,
    )
    is_chosen = choose and args.layers_per_stage == AUTO
    return _with_auto_split(args, settings, cost_model) if is_chosen else settings


def _modes(args: argparse.Namespace) -> tuple[Recompute, ...]:
    """The modes to choose among: with adapters, layers are not recomputed as a whole (`bridge.recipe`)."""
    return tuple(Recompute) if adapters_of(args) is None else (Recompute.NONE, Recompute.SELECTIVE)


def network_of(args: argparse.Namespace, links: Mapping[str, Link]) -> Network:
    """The links that the arguments give; else those measured; else the cluster's; else the published planner's."""
    cluster = _cluster(args)
    of_cluster = None if cluster is None else cluster.devices_per_node
    return Network.over(
        {**({} if cluster is None else cluster.links), **links},
        devices_per_node=args.devices_per_node or of_cluster or _DEVICES_PER_NODE,
        intra_node_gbps=args.intra_node_gbps,
        inter_node_gbps=args.inter_node_gbps,
        intra_node_latency_us=args.intra_node_latency_us,
        inter_node_latency_us=args.inter_node_latency_us,
    )


def _memory_limit_bytes(args: argparse.Namespace) -> int:
    if args.device_memory_limit is not None:
        limit_mb: float = args.device_memory_limit
        return round(limit_mb * BYTES_PER_MB)
    if (cluster := _cluster(args)) is None:
        raise ConfigError("expected memory of a device, got none", hint="pass --device-memory-mb N, or --cluster FILE")
    return cluster.memory_limit_bytes


def _cluster(args: argparse.Namespace) -> Cluster | None:
    named: Path | None = getattr(args, "cluster", None)
    return None if named is None else read_cluster(named)


def describe_cluster(args: argparse.Namespace, settings: PlannerSettings) -> dict[str, Any]:
    """The memory and links that were planned for, and whose they are, for reports."""
    network = settings.network
    return {
        "file": None if args.cluster is None else str(args.cluster),
        "device_memory_mb": settings.memory_limit_bytes / BYTES_PER_MB,
        **{field.name: getattr(network, field.name) for field in dataclasses.fields(network)},
    }


def cluster_line(described: Mapping[str, Any]) -> str:
    """`describe_cluster` for people."""
    name = described["file"] or "as the published planner has it"
    return (
        f"cluster: {name}: {described['devices_per_node']} devices per node with"
        f" {described['device_memory_mb']:.0f} MB each, {described['intra_node_gbps']:g} Gbit/s and"
        f" {described['intra_node_latency_us']:g} µs inside a node, {described['inter_node_gbps']:g} Gbit/s and"
        f" {described['inter_node_latency_us']:g} µs between nodes"
    )


def _with_auto_split(args: argparse.Namespace, settings: PlannerSettings, cost_model: CostModel) -> PlannerSettings:
    every = [batch.global_batch(0) for batch in given_batches(args)]
    chosen_from = to_plan = [batch for batch in every if len(batch.sample_ids)]
    if not to_plan:  # the commands say so of each batch
        return settings
    if args.split_from:
        named = read_batches(
            args.split_from,
            args.model,
            max_seq_len=args.max_seq_len,
            max_target_len=args.max_target_len or args.max_seq_len,
        )
        usual = median_high([batch.tokens for batch in to_plan])
        # How even stages are at the ends of a pipeline counts for more the fewer micro-batches there are.
        chosen_from = [part for batch in named for part in batch.global_batch(0).parts(max(usual, 1))]
    more = MORE_CHUNKS if args.virtual_stages == AUTO else ()
    layer_split = choose_layer_split(settings, cost_model, chosen_from, to_fit=to_plan, chunks=more, trials=args.trials)
    return settings.with_layers_per_stage(layer_split)


def _layers(args: argparse.Namespace) -> tuple[int, int]:
    both = (args.encoder_layers, args.decoder_layers)
    if args.model.is_encoder_decoder:
        if args.layers is not None or None in both:
            raise ConfigError(f"a {args.model} model needs --encoder-layers and --decoder-layers, and no --layers")
        return args.encoder_layers, args.decoder_layers
    if args.layers is None or both != (None, None):
        raise ConfigError(f"a {args.model} model needs --layers, and no --encoder-layers or --decoder-layers")
    return args.layers, 0
