"""DynaPipe's flags, and the checks of Megatron's flags that it depends on.

Megatron's namespace is read here and in the model providers, nowhere else: the rest takes `RunSettings`.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_dynapipe import cpu
from megatron_dynapipe.config import CONFIG_FLAG, UNSET_FLAG
from megatron_dynapipe.cost import ScatterGather
from megatron_dynapipe.cost.format import read_file
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import (
    batch_layout,
    clusters,
    legacy,
    placement,
    sampling,
    shape_buckets,
    store_address,
    transfer_rules,
)
from megatron_dynapipe.integration.flags.megatron import check as megatron_check
from megatron_dynapipe.integration.flags.ranges import check_ranges
from megatron_dynapipe.integration.models import flags as model_flags
from megatron_dynapipe.planning.baselines import PartitionSettings
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.sampling import LongSamples, TruncationSide
from megatron_dynapipe.store import StoreAddress
from megatron_dynapipe.units import BYTES_PER_MB, LENGTH_MULTIPLE, ModelFamily, Recompute, target_positions

ARGS_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",  # our iterators pass through Megatron untouched
    "micro_batch_size": 1,  # nominal: makes an iteration N samples for --global-batch-size N, whatever the plan cuts
    "tokenizer_type": "HuggingFaceTokenizer",
}
"""Defaults of Megatron's arguments, by destination, for every planned run."""

REPORT_FOLDER = Path("dynapipe-report")
"""Where records and pictures go if no other folder is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What one run asks of DynaPipe, as given on the command line.

    Attributes:
        data: dataset folder.
        store: an existing plan store; None starts an embedded one.
        store_bind: address at which an embedded store listens.
        cost_model: cost model file; None plans with the analytic model.
        memory_limit_bytes: memory of a device that plans may use; None takes the device's, less a margin.
        recompute: modes of recomputation that a micro-batch may be given.
        recalibrate: correct the cost model by what is measured while training.
        long_samples: what becomes of samples longer than the maximum.
        truncate: where truncated ones lose tokens.
        loss_on: which tokens of a decoder-only sample count; None as the dataset says.
        ahead: iterations planned ahead of training.
        ahead_bytes: bytes of plans that lie in the store ahead of training.
        timeout_s: deadline of every wait: for a plan, for a peer, for the planner to start.
        report_folder: where the run's records and pictures go.
        report_every: iterations between two pages of the run while it trains; 0 writes none.
        schedule: how passes are ordered.
        planners: planner processes of the job.
        devices_per_node: ranks on each node.
        intra_node_gbps, inter_node_gbps, intra_node_latency_us, inter_node_latency_us: links, for predictions; None
            takes those that the cost model file has measured, else `Network`'s.
        scatter_gather: whether messages between stages are divided over tensor-parallel ranks.
        reserve_all_memory: whether all that plans may use of a GPU is taken before the first iteration.
    """

    data: Path
    store: StoreAddress | None
    store_bind: str
    cost_model: Path | None
    memory_limit_bytes: int | None
    recalibrate: bool
    recompute: tuple[Recompute, ...]
    long_samples: LongSamples
    truncate: TruncationSide
    loss_on: LossOn | None
    ahead: int
    ahead_bytes: int
    timeout_s: float
    report_folder: Path
    report_every: int
    partition: PartitionSettings
    schedule: ScheduleSettings
    planners: int
    devices_per_node: int
    intra_node_gbps: float | None
    inter_node_gbps: float | None
    intra_node_latency_us: float | None
    inter_node_latency_us: float | None
    scatter_gather: ScatterGather
    reserve_all_memory: bool = False
    dump_folder: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RunSettings":
        """From the parsed flags; raises ConfigError for values out of range."""
        if args.dynapipe_data is None:
            raise ConfigError(
                "expected a dataset folder, got none",
                hint="pass --dynapipe-data DIR; `megatron-dynapipe data demo --output DIR` makes one",
            )
        check_ranges(args)
        transfer_rules.transfer_rules(args, on_cpu=True)  # refuses what is no number
        shape_buckets.shape_buckets(args)
        limit_mb = args.dynapipe_device_memory_limit
        report_folder = args.dynapipe_report_dir or legacy.report_folder(os.environ) or REPORT_FOLDER
        searches = {"search_evaluations": 0} if args.dynapipe_disable_mb_permutation else {}
        return cls(
            data=args.dynapipe_data,
            store=store_address.given_store(args),
            store_bind=args.dynapipe_store_bind,
            cost_model=args.dynapipe_cost_model,
            memory_limit_bytes=None if limit_mb is None else int(limit_mb * BYTES_PER_MB),
            recompute=recompute_modes(args),
            recalibrate=args.dynapipe_recalibrate,
            long_samples=LongSamples(args.dynapipe_long_samples),
            truncate=TruncationSide(args.dynapipe_truncate),
            loss_on=None if args.dynapipe_loss is None else LossOn(args.dynapipe_loss),
            ahead=args.dynapipe_lookahead,
            ahead_bytes=max(int(args.dynapipe_lookahead_mb * BYTES_PER_MB), 1),
            timeout_s=args.dynapipe_timeout_s,
            report_folder=report_folder,
            report_every=args.dynapipe_report_every,
            dump_folder=legacy.dump_folder(os.environ, report_folder),
            partition=legacy.partition_settings(args),
            schedule=ScheduleSettings(method=legacy.schedule_name(args.dynapipe_schedule_method), **searches),
            planners=placement.planner_count(
                args.dynapipe_prefetch_planner_num_workers,
                nodes=placement.nodes(world_size()),
            ),
            devices_per_node=placement.devices_per_node(args.dynapipe_device_to_node, world_size()),
            intra_node_gbps=args.dynapipe_intra_node_bw,
            inter_node_gbps=args.dynapipe_inter_node_bw,
            intra_node_latency_us=args.dynapipe_intra_node_lat,
            inter_node_latency_us=args.dynapipe_inter_node_lat,
            scatter_gather=ScatterGather(args.dynapipe_scatter_gather),
            reserve_all_memory=args.dynapipe_reserve_all_memory,
        )


def world_size() -> int:
    """Number of ranks, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DynaPipe's flags, and the defaults of Megatron's that go with them: an `extra_args_provider` of Megatron's.

    What argparse cannot parse is from now on a ConfigError: its own way prints every flag of Megatron, on every rank.
    """
    add_flags(parser)
    parser.set_defaults(**ARGS_DEFAULTS)

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message, hint="--help lists all flags")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add DynaPipe's flags alone; nothing happens if they are there, as in a patched checkout."""
    if "--use-dynapipe" in parser._option_string_actions:  # argparse has no public look-up of its options
        return
    group = parser.add_argument_group("dynapipe", "micro-batches of varying shape, planned ahead of training")
    add = group.add_argument
    add("--use-dynapipe", action="store_true", help="train from plans (this project's entry scripts always do)")
    # These two are taken off the command line before it is parsed; they stand here for --help.
    add(CONFIG_FLAG, type=Path, help="YAML file of flags; the command line wins over it")
    add(UNSET_FLAG, action="append", metavar="NAME", help="ignore this flag of the file")
    add(
        "--dynapipe-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where there is a device (default)",
    )
    add("--dynapipe-data", type=Path, help="dataset folder, made by `megatron-dynapipe data`")
    store_address.add_arguments(group)
    add("--dynapipe-store-bind", default="127.0.0.1", help="address of the embedded store, for runs on several nodes")
    _add_cost_flags(add)
    add("--dynapipe-device-memory-limit", type=float, metavar="MB", help="memory of a device that plans may use")
    add(
        "--dynapipe-limit-rc-type",
        metavar="MODES",
        help="of none,selective,full those that plans may choose among for a micro-batch "
        "(default: what --recompute-granularity says, else all three)",
    )
    add("--dynapipe-lookahead", type=int, default=8, metavar="N", help="iterations planned ahead of training")
    add("--dynapipe-timeout-s", type=float, default=300.0, metavar="S", help="deadline of every wait (default 300)")
    add("--dynapipe-report-dir", type=Path, help=f"folder of records and pictures (default {REPORT_FOLDER})")
    add("--dynapipe-report-every", type=int, default=0, metavar="N", help="write its report.html every N iterations")
    measured = "(default: the cost model's measured one, else %s)"
    add("--dynapipe-intra-node-bw", type=float, metavar="GBPS", help=f"between devices of a node {measured}" % 4800)
    add("--dynapipe-inter-node-bw", type=float, metavar="GBPS", help=f"between nodes {measured}" % 100)
    add("--dynapipe-intra-node-lat", type=float, metavar="US", help=f"latency within a node {measured}" % 0)
    add("--dynapipe-inter-node-lat", type=float, metavar="US", help=f"latency between nodes {measured}" % 4000)
    add(
        "--dynapipe-scatter-gather",
        choices=[choice.value for choice in ScatterGather],
        default=ScatterGather.AUTO.value,
        help="divide messages between stages over tensor-parallel ranks, which gather them: where the links' speeds "
        "make that faster (default), always, or never",
    )
    clusters.add_arguments(group)
    shape_buckets.add_arguments(group)
    batch_layout.add_arguments(group)
    sampling.add_arguments(group)
    transfer_rules.add_arguments(group)
    model_flags.add_arguments(group)
    legacy.add_arguments(group)


def _add_cost_flags(add: Callable[..., Any]) -> None:
    """Where predicted times and memory come from."""
    add("--dynapipe-cost-model", type=Path, help="cost model file (default: measured, see --dynapipe-calibrate)")
    add(
        "--dynapipe-calibrate",
        type=float,
        default=20.0,
        metavar="S",
        help="without a cost model file, measure the model's layers for so many seconds before training, and keep that "
        "for later runs (default 20; 0: costs are computed from the model's shape)",
    )
    add("--dynapipe-recalibrate", action="store_true", help="correct the cost model by what is measured in training")


def switches(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Every flag of a parser without its dashes, and whether it is a switch (takes no value)."""
    return {
        option.lstrip("-"): action.nargs == 0
        for action in parser._actions  # argparse has no public list of its options
        for option in action.option_strings
        if option.startswith("--")
    }


def check(args: argparse.Namespace, family: ModelFamily) -> RunSettings:
    """Check parsed flags before anything is started, and return the settings they give.

    Raises:
        ConfigError: a flag or variable is refused, or a value cannot be.
        CostModelError: the cost model's file cannot be read.
    """
    legacy.check(args)
    legacy.set_log_level(os.environ)
    check_layout(args, world_size())
    check_supported(args, family)
    maximum_lengths(args, family)
    batch_layout.batch_layouts(args, family, on_cpu=cpu.is_enabled())
    settings = RunSettings.from_args(args)
    if settings.cost_model is not None:
        read_file(settings.cost_model)
    return settings


def check_layout(args: argparse.Namespace, world_size: int) -> None:
    """Refuse parallel sizes and batch sizes that do not divide, before Megatron asserts on them."""
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % model_size:
        raise ConfigError(
            f"expected a number of ranks that tensor × pipeline × context parallel sizes divide ({model_size}), "
            f"got {world_size}",
            hint="change torchrun's --nproc-per-node (or --nnodes), or the parallel sizes",
        )
    replicas = world_size // model_size
    if args.global_batch_size is None or args.global_batch_size % replicas:
        raise ConfigError(
            f"expected --global-batch-size to be a multiple of the {replicas} data-parallel replicas, "
            f"got {args.global_batch_size}",
            hint=f"for example {replicas * max((args.global_batch_size or 0) // replicas, 1)}",
        )


def check_supported(args: argparse.Namespace, family: ModelFamily) -> None:
    """Refuse Megatron options under which a planned run would not do what they say; say which have no effect.

    `megatron` has the decision on every one of them; here are those that hang on a value or on several flags.

    Raises:
        ConfigError: names the option, the reason and what to do.
    """
    for refused, flag, reason in _refusals(args):
        if refused:
            raise ConfigError(f"{flag} cannot be used with DynaPipe: {reason}", hint=f"remove {flag}")
    without_effect = megatron_check.check(args, family, megatron_check.actions())
    if without_effect and os.environ.get("RANK", "0") == "0":
        print(f"without effect on a planned run: {', '.join(without_effect)}", flush=True)
    if not args.calculate_per_token_loss:
        raise ConfigError(
            "DynaPipe needs --calculate-per-token-loss: micro-batches hold different numbers of tokens, and only a sum "
            "over tokens divided once by their number has the same gradient however they are cut",
            hint="add --calculate-per-token-loss",
        )
    if args.dataloader_type != "external" or args.micro_batch_size != 1:
        raise ConfigError(
            "expected --dataloader-type external and --micro-batch-size 1 (the plan decides both), got "
            f"{args.dataloader_type} and {args.micro_batch_size}",
            hint="remove these flags",
        )


def _refusals(args: argparse.Namespace) -> list[tuple[bool, str, str]]:
    divide = args.dynapipe_scatter_gather == ScatterGather.ON
    positions, layers = args.position_embedding_type, args.transformer_impl
    return [
        (
            divide and args.tensor_model_parallel_size == 1,
            "--dynapipe-scatter-gather on",
            "there are no tensor-parallel ranks to divide messages over",
        ),
        (
            divide and args.sequence_parallel,
            "--dynapipe-scatter-gather on",
            "under sequence parallelism every rank sends its own part already",
        ),
        (
            divide and args.pipeline_model_parallel_size == 1,
            "--dynapipe-scatter-gather on",
            "one stage sends no messages",
        ),
        (positions == "mrope", f"--position-embedding-type {positions}", "samples have one position per token"),
        (layers not in ("local", "transformer_engine"), f"--transformer-impl {layers}", "its layers do not train"),
        (
            args.optimizer not in ("adam", "sgd"),
            f"--optimizer {args.optimizer}",
            "plans leave room for the states of adam and sgd",
        ),
    ]


def recompute_modes(args: argparse.Namespace) -> tuple[Recompute, ...]:
    """The modes of recomputation that plans choose among.

    Raises:
        ConfigError: an unknown mode, one twice, or none.
    """
    given = args.dynapipe_limit_rc_type
    if given is None:
        asked = "selective" if getattr(args, "recompute_activations", False) else args.recompute_granularity
        return tuple(Recompute) if asked is None else (Recompute(asked),)
    words = [word.strip() for word in given.split(",")]
    known = [mode.value for mode in Recompute]
    if not set(words) <= set(known) or len(set(words)) != len(words):
        raise ConfigError(f"expected --dynapipe-limit-rc-type to name some of {','.join(known)}, got {given!r}")
    return tuple(mode for mode in Recompute if mode.value in words)


def maximum_lengths(args: argparse.Namespace, family: ModelFamily) -> tuple[int, int]:
    """Longest input and target in tokens: those whose positions fit Megatron's sequence lengths.

    Raises:
        ConfigError: a length is missing, or not a multiple of what shapes are rounded up to.
    """
    lengths = {"--seq-length": args.seq_length}
    if family is ModelFamily.T5:
        lengths["--decoder-seq-length"] = args.decoder_seq_length
    for flag, length in lengths.items():
        if length is None or length % LENGTH_MULTIPLE:
            raise ConfigError(f"expected {flag} to be a multiple of {LENGTH_MULTIPLE}, got {length}")
    if family is ModelFamily.GPT:
        return args.seq_length + 1, 0  # n tokens train n - 1 positions
    return args.seq_length, args.decoder_seq_length - target_positions(family, 0)
