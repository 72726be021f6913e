"""What a run file says apart from its model: taken if no flag says it, and named if it is not read."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dynapipe.cli.model_config import RUN_FILES, is_recipe
from megatron_dynapipe.config import expand, read
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.megatron.flags.planning_flags import AUTO, EQUAL, TRAINING, add_planning_flags, defaults

SIZES = ("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel")
"""The flags of a layout: a run file's count if no flag gives any of them."""
_DEFAULTS: Mapping[str, Any] = {
    **defaults(),
    "scatter_gather": "off",
    "virtual_stages": AUTO,
    "distributed_optimizer": False,
}
"""What a run file may give that differs here: commands send messages whole, as the published rules have it."""

_MEGATRONS = {
    "tensor-model-parallel-size": "tensor_parallel",
    "pipeline-model-parallel-size": "pipeline_parallel",
    "expert-model-parallel-size": "expert_parallel",
    "num-virtual-stages-per-pipeline-rank": "virtual_stages",
    "use-distributed-optimizer": "distributed_optimizer",
    "sequence-parallel": "sequence_parallel",
}
_NOT_READ = (
    *("fp16", "num-layers-per-virtual-pipeline-stage", "pipeline-model-parallel-layout", "recompute-method"),
    *("recompute-modules", "recompute-num-layers", "recompute-activations", "distribute-saved-activations"),
    *("use-precision-aware-optimizer", "main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"),
    *("optimizer-cpu-offload", "cpu-offloading-num-layers", "grad-reduce-in-bf16", "use-megatron-fsdp"),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "num-distributed-optimizer-instances"),
    *("account-for-loss-in-pipeline-split", "account-for-embedding-in-pipeline-split"),
)
_USUAL = {"bf16": True, "optimizer": "adam"}
"""Flags of Megatron's that change memory or time, and that costs do not know; of two, any other value."""


def is_run_file(args: argparse.Namespace) -> bool:
    """Whether completed arguments name a run file, and not another file of a model."""
    file: Path | None = args.model_config
    return file is not None and file.suffix in RUN_FILES and not is_recipe(args)


def take_run_file(args: argparse.Namespace) -> None:
    """Settle what the command line leaves open: as the run file of --model-config has it, else by default.

    Raises:
        ConfigError: the file has a value that is none.
    """
    said: dict[str, Any] = {}
    if is_run_file(args):
        flags = read(args.model_config)
        said = _planning_flags(args.model_config) | _megatrons(flags, args.model_config)
        not_read = [name for name in _NOT_READ if flags.get(name) not in (None, False)]
        not_read += [f"{name}: {flags[name]}" for name, usual in _USUAL.items() if flags.get(name, usual) != usual]
        sizes = {name: said.pop(name) for name in SIZES if name in said}
        if all(getattr(args, name, 0) is None for name in SIZES):
            said |= sizes
            layout = ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
            _say(f"layout of {args.model_config}: {layout}", sizes)
        elif getattr(args, "layers_per_stage", AUTO) is None and isinstance(said.get("layers_per_stage"), tuple):
            not_read.append("dynapipe-layers-per-stage (of another layout)")
            del said["layers_per_stage"]
        _say(f"not read of {args.model_config}: {', '.join(not_read)}", not_read)
    usual = {**_DEFAULTS, "layers_per_stage": args.usual_split} | dict.fromkeys(SIZES, 1)
    for name, value in (usual | said).items():
        if getattr(args, name, 0) is None:
            setattr(args, name, value)


def _say(line: str, about: object) -> None:
    if about:
        print(line, file=sys.stderr)


def _planning_flags(path: Path) -> dict[str, object]:
    """The run file's flags that say what plans choose among."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, argument_default=argparse.SUPPRESS)
    add_planning_flags(parser, TRAINING)
    parser.set_defaults(**{f"dynapipe_{name}": None for name in defaults()})
    try:
        found, _ = parser.parse_known_args(expand(["--dynapipe-config", str(path)]))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{path}: {error}") from None
    taken = {name.removeprefix("dynapipe_"): value for name, value in vars(found).items() if value is not None}
    if taken.get("layers_per_stage") == EQUAL:
        del taken["layers_per_stage"]
    return taken


def _megatrons(flags: Mapping[str, object], path: Path) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for flag, name in _MEGATRONS.items():
        if flag not in flags:
            continue
        value = flags[flag]
        is_switch = name in ("distributed_optimizer", "sequence_parallel")
        if type(value) is not (bool if is_switch else int) or (isinstance(value, int) and not is_switch and value < 1):
            expected = "true or false" if is_switch else "a number from 1"
            raise ConfigError(f"{path}: expected {flag} to be {expected}, got {value}")
        taken[name] = value
    if (granularity := flags.get("recompute-granularity")) is not None:
        if granularity not in set(Recompute):
            raise ConfigError(f"{path}: expected recompute-granularity full or selective, got {granularity}")
        taken["limit_rc_type"] = (Recompute(str(granularity)),)
    return taken
