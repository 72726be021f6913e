"""The published DynaPipe's flags and environment variables: each is honoured with its meaning, or refused with what
replaces it.

The tables drive the parser, the refusals and the table of docs/migrating.md, which a test compares with them.
"""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.schedules import SCHEDULES
from megatron_dynapipe.units import LENGTH_MULTIPLE

DEFAULT_KV_PORT = 29500
"""Where the published store listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyName:
    """One name of the published fork.

    Attributes:
        name: of the flag or variable.
        honoured: whether it is taken; otherwise giving it stops the run.
        note: honoured: what it does here; refused: why it is not taken.
        instead: what to do instead, of a refused one.
        switch: whether the flag takes no value.
    """

    name: str
    honoured: bool
    note: str
    instead: str = ""
    switch: bool = False


def _honoured(name: str, note: str) -> LegacyName:
    return LegacyName(name=name, honoured=True, note=note)


def _refused(name: str, note: str, instead: str, *, switch: bool = False) -> LegacyName:
    return LegacyName(name=name, honoured=False, note=note, instead=instead, switch=switch)


FLAGS: tuple[LegacyName, ...] = (
    _honoured("--use-dynapipe", "trains from plans; needed only in a patched checkout"),
    _honoured("--dynapipe-cost-model", "a cost model file in JSON; without it, the layers are measured first"),
    _honoured("--dynapipe-device-to-node", "rank:node for every rank; without it, as torchrun placed the ranks"),
    _honoured("--dynapipe-device-memory-limit", "MB that plans may use; without it, 90 % of the device's memory"),
    _honoured("--dynapipe-intra-node-bw", "Gbit/s between devices of a node"),
    _honoured("--dynapipe-inter-node-bw", "Gbit/s between nodes"),
    _honoured("--dynapipe-intra-node-lat", "µs within a node"),
    _honoured("--dynapipe-inter-node-lat", "µs between nodes"),
    _honoured("--dynapipe-layer-to-device", "the stage of every layer; `--dynapipe-layers-per-stage` is shorter"),
    _honoured(
        "--dynapipe-partition-algo",
        "dp (the default), or to compare with: token_based, uniform (samples sorted, as many to each micro-batch) or"
        " padding (to the iteration's longest sample)",
    ),
    _honoured(
        "--dynapipe-token-based-partition-mbs",
        "padded positions of a micro-batch, with token_based; without it, the fastest power of two",
    ),
    _honoured(
        "--dynapipe-schedule-method",
        "adaptive, 1f1b or gpipe; 1F1B and interleaved-1F1B mean 1f1b, (wait-free-)cyclic and dynamic mean adaptive",
    ),
    _honoured("--dynapipe-disable-mb-permutation", "the adaptive schedule keeps the first order it finds"),
    _honoured("--dynapipe-prefetch-planner-num-workers", "planner processes per node; without it, one per job"),
    _honoured("--dynapipe-limit-rc-type", "the modes of recomputation that plans choose among"),
    _honoured(
        "--dynapipe-round-seqlen-multiple", f"lengths are rounded up to it; multiples of {LENGTH_MULTIPLE}, the default"
    ),
    _honoured("--dynapipe-zero-stage", "0, or 1 with `--use-distributed-optimizer`, from which memory is computed"),
    _honoured(
        "--dynapipe-enable-packing",
        "plans may pack samples into rows, which do not attend to each other: `--dynapipe-layout auto`, the default",
    ),
    _refused(
        "--dynapipe-disable-tsp",
        "samples are not ordered by a tour",
        "leave it out: ordering takes a sort",
        switch=True,
    ),
    _refused(
        "--dynapipe-disable-scheduler-memory-limit",
        "a schedule that ignores memory ends training when it runs out",
        "raise --dynapipe-device-memory-limit",
        switch=True,
    ),
    _refused(
        "--dynapipe-per-mb-mem-fraction",
        "how much memory a micro-batch may take follows from the schedule, which is simulated",
        "lower --dynapipe-device-memory-limit to leave more room",
    ),
    _refused(
        "--dynapipe-prefetch-listener-num-workers",
        "each rank fetches its plans in one thread, which blocks until they come",
        "--dynapipe-lookahead sets how many iterations are planned ahead",
    ),
    _honoured("--dynapipe-reserve-all-memory", "takes all that plans may use of a GPU before the first iteration"),
    _refused(
        "--dynapipe-custom-allocator",
        "no allocator is replaced; PyTorch's does not fragment when its segments can grow",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        switch=True,
    ),
    _refused(
        "--dynapipe-seqlen-offset",
        "a sample's positions follow from its tokens and the kind of model",
        "leave it out",
    ),
    _honoured("--tokens-per-global-batch", "tokens (input and target) of an iteration at most"),
    _refused(
        "--dynamic-batchsize",
        "batches of tokens need no switch",
        "pass --tokens-per-global-batch alone",
        switch=True,
    ),
    _honoured("--train-epochs", "epochs, from which the number of iterations is computed"),
)
"""Every flag of the fork."""

VARIABLES: tuple[LegacyName, ...] = (
    _honoured("DYNAPIPE_KV_HOST", "host of an existing plan store, unless `--dynapipe-store-url` names one"),
    _honoured("DYNAPIPE_KV_PORT", f"its port; without it, {DEFAULT_KV_PORT}"),
    _honoured("DYNAPIPE_DEBUG", "level of this package's log: DEBUG, INFO, WARNING or ERROR"),
    _honoured(
        "DYNAPIPE_LOGGING_DEBUG_DIR", "folder of records, logs and pictures, unless `--dynapipe-report-dir` is given"
    ),
    _honoured("DYNAPIPE_DEBUG_DUMP_EP_STATS", "true or 1 writes every iteration's plan to a file: see below"),
    _honoured("DYNAPIPE_DEBUG_DUMP_EP_PREFIX", "folder of these files; without it, `plans` in the report folder"),
)
"""Every environment variable of the fork."""

OFF = ("", "0", "f", "false")
"""Values of a switch that ask for nothing."""
ON = ("1", "t", "true")
"""Values that switch something on."""

SCHEDULE_NAMES: Mapping[str, str] = {name: name for name in SCHEDULES} | {
    "1F1B": "1f1b",
    "interleaved-1F1B": "1f1b",
    "cyclic": "adaptive",
    "wait-free-cyclic": "adaptive",
    "dynamic": "adaptive",
}
"""Schedules by this project's names and by the fork's."""

PARTITION_NAMES = tuple(name for name in PartitionAlgorithm if name is not PartitionAlgorithm.PACKING)
"""Ways to make micro-batches that can be trained with."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    """Add the flags that only people who come from the fork will give; refused ones are known, but not in --help."""
    add = group.add_argument
    add("--dynapipe-device-to-node", metavar="RANK:NODE,…", help="node of every rank (default: as torchrun says)")
    add("--dynapipe-layer-to-device", metavar="STAGE,…", help="stage of every layer (see --dynapipe-layers-per-stage)")
    add("--dynapipe-partition-algo", default="dp", metavar="NAME", help=f"of {', '.join(PARTITION_NAMES)}")
    add("--dynapipe-token-based-partition-mbs", type=int, metavar="N", help="positions of a token_based micro-batch")
    add("--dynapipe-schedule-method", default="adaptive", metavar="NAME", help=f"of {', '.join(SCHEDULES)}")
    add("--dynapipe-disable-mb-permutation", action="store_true", help="do not search for a better order of passes")
    add(
        "--dynapipe-prefetch-planner-num-workers",
        type=int,
        metavar="N",
        help="planners per node (default: one in all)",
    )
    add(
        "--dynapipe-reserve-all-memory",
        action="store_true",
        help="take all that plans may use of a GPU before the first iteration, into segments that grow",
    )
    add("--dynapipe-enable-packing", action="store_true", help="as --dynapipe-layout auto says (the default)")
    add("--dynapipe-zero-stage", type=int, metavar="0|1", help="as --use-distributed-optimizer says (the default)")
    for flag in FLAGS:
        if not flag.honoured and flag.switch:
            add(flag.name, action="store_true", help=argparse.SUPPRESS)
        elif not flag.honoured:
            add(flag.name, help=argparse.SUPPRESS)


def check(args: argparse.Namespace) -> None:
    """Refuse what is not honoured, and values of another meaning.

    Raises:
        ConfigError: names the flag, why, and what to do instead.
    """
    for flag in FLAGS:
        if not flag.honoured and getattr(args, destination(flag.name)) not in (None, False):
            raise ConfigError(f"{flag.name} is not taken: {flag.note}", hint=flag.instead)
    stage, distributed = args.dynapipe_zero_stage, bool(args.use_distributed_optimizer)
    if stage is not None and stage != int(distributed):
        raise ConfigError(
            f"expected --dynapipe-zero-stage {int(distributed)} {'with' if distributed else 'without'} "
            f"--use-distributed-optimizer, got {stage}",
            hint="stage 1 is --use-distributed-optimizer; leave --dynapipe-zero-stage out",
        )


def destination(flag: str) -> str:
    """The attribute of parsed arguments that holds a flag."""
    return flag.lstrip("-").replace("-", "_")


def schedule_name(given: str) -> str:
    """Our name of a schedule; raises ConfigError with the names that are known."""
    if given not in SCHEDULE_NAMES:
        raise ConfigError(
            f"expected --dynapipe-schedule-method of {', '.join(SCHEDULES)}, got {given!r}",
        )
    return SCHEDULE_NAMES[given]


def partition_settings(args: argparse.Namespace) -> PartitionSettings:
    """How micro-batches are made.

    Raises:
        ConfigError: a name that is not known, packing, or a number of tokens that does not go with the name.
    """
    given, tokens = args.dynapipe_partition_algo, args.dynapipe_token_based_partition_mbs
    if given not in set(PartitionAlgorithm):
        raise ConfigError(f"expected --dynapipe-partition-algo of {', '.join(PARTITION_NAMES)}, got {given!r}")
    algorithm = PartitionAlgorithm(given)
    if tokens is not None and algorithm is not PartitionAlgorithm.TOKEN_BASED:
        raise ConfigError(
            f"--dynapipe-token-based-partition-mbs goes with --dynapipe-partition-algo token_based, not with {given}",
            hint="leave it out: micro-batches are cut by predicted time",
        )
    if tokens is not None and tokens < 1:
        raise ConfigError(f"expected --dynapipe-token-based-partition-mbs of at least 1, got {tokens}")
    return PartitionSettings(algorithm=algorithm, micro_batch_tokens=tokens)


def store_url(environ: Mapping[str, str]) -> str | None:
    """The store that the fork's variables name, if one is set; raises ConfigError for a port that is none."""
    host, port = environ.get("DYNAPIPE_KV_HOST", ""), environ.get("DYNAPIPE_KV_PORT", "")
    if not host and not port:
        return None
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"expected DYNAPIPE_KV_PORT from 1 to 65535, got {port!r}")
    host = host or "localhost"
    return f"redis://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_KV_PORT}/0"


def report_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder that the fork's variable names for logs, if it is set."""
    given = environ.get("DYNAPIPE_LOGGING_DEBUG_DIR", "")
    return Path(given) if given else None


def dump_folder(environ: Mapping[str, str], report_folder: Path) -> Path | None:
    """Where plans go as files, if the fork's variables ask for that; raises ConfigError for a switch that is none."""
    given = environ.get("DYNAPIPE_DEBUG_DUMP_EP_STATS", "").lower()
    if given in OFF:
        return None
    if given not in ON:
        raise ConfigError(
            f"expected DYNAPIPE_DEBUG_DUMP_EP_STATS of {', '.join(ON)}, or unset, got {given!r}",
            hint="DYNAPIPE_DEBUG_DUMP_EP_PREFIX names the folder",
        )
    return Path(environ.get("DYNAPIPE_DEBUG_DUMP_EP_PREFIX") or report_folder / "plans")


def set_log_level(environ: Mapping[str, str]) -> None:
    """Set this package's log to the level that the fork's variable asks for, if it is set."""
    given = environ.get("DYNAPIPE_DEBUG", "").upper()
    if not given:
        return
    if given not in LOG_LEVELS:
        raise ConfigError(f"expected DYNAPIPE_DEBUG of {', '.join(LOG_LEVELS)}, got {given!r}")
    logging.getLogger("megatron_dynapipe").setLevel(given)
