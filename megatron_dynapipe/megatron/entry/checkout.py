"""A planned run inside a patched Megatron-LM checkout: its flags, its checks, its start and its end.

Patches import this module as `megatron_dynapipe.checkout_hooks` and call the functions of `__all__`, whose names stay,
so that a checkout patched today works with later versions. Each does nothing, or answers as Megatron would, unless
`--use-dynapipe` is given; this project's entry scripts do the same for themselves (`runs`). Nothing of Megatron is
imported before it is needed: its own modules import this one.
"""

import argparse
import atexit
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_dynapipe import config, cpu
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.entry import start
from megatron_dynapipe.megatron.entry.bootstrap import prepare_environment
from megatron_dynapipe.megatron.entry.failure import reported
from megatron_dynapipe.megatron.flags import command_line, fork
from megatron_dynapipe.megatron.flags.planning_flags import AUTO
from megatron_dynapipe.megatron.flags.refusals import own_actions
from megatron_dynapipe.megatron.hooks import active_run, compatibility, repairs, replacements
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.megatron.supply.same_flags import check_same_flags, comparable
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.runtime.control_group import ControlGroup

if TYPE_CHECKING:
    from megatron_dynapipe.megatron.entry.script import ScriptRun

__all__ = [
    "add_arguments",
    "check_arguments",
    "dataset_provider",
    "finish",
]

_run: "ScriptRun | None" = None
"""The run that this module started; an entry script's run is closed by its own `with`."""
_originals = Originals()
_known: Sequence[argparse.Action] = ()
"""The checkout's own arguments."""
_flags: Mapping[str, str] = {}
"""The flags as ranks compare them."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DynaPipe's flags and expand the run file into the command line.

    With `--use-dynapipe` Megatron's defaults become a planned run's, and bad flags end it with one line.
    """
    global _known
    _known = own_actions(parser)
    command_line.add_flags(parser)
    with reported():
        sys.argv[1:] = config.expand(sys.argv[1:])
        if "--use-dynapipe" in sys.argv[1:]:
            fork.check(sys.argv[1:], os.environ)
            early = config.early_flags(sys.argv[1:])
            device = "cpu" if cpu.is_enabled() else "auto"
            prepare_environment(early.tensor_model_parallel_size, early.pipeline_model_parallel_size, device)
            command_line.add_arguments(parser)
            parser.error = reported()(parser.error)  # type: ignore[method-assign]
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what a planned run does not support, and fill in the dataset's tokenizer; ends the process with one line.

    Patches Megatron's optimizer too: a checkpoint is loaded before the run becomes active.
    """
    global _flags
    if not args.use_dynapipe:
        return
    end_with_launcher()
    with reported():
        _check_device()
        compatibility.check_patches()
        compatibility.check(builds=False)
        repairs.apply()
        _check_model_flags()
        _check_timers(args, on_cpu=cpu.is_enabled())
        _flags = comparable(args)
        if args.dynapipe_layers_per_stage == AUTO:
            raise ConfigError(
                "--dynapipe-layers-per-stage auto is not supported in a patched checkout, whose model is built first",
                hint="`megatron-dynapipe plan` prints layers per stage: pass those, 7,6.5,6.5,4 or the like",
            )
        settle = functools.partial(command_line.settle, args, ModelFamily.GPT, _known)
        start.start_together(settle, timeout_s=args.dynapipe_timeout_s, name="flags")
        compare = functools.partial(start.compare_flags, _flags, timeout_s=args.dynapipe_timeout_s)
        start.start_together(compare, timeout_s=args.dynapipe_timeout_s, name="compared flags")
        if not isinstance(split := args.dynapipe_layers_per_stage, str) and any(layers % 1 for layers in split):
            from megatron_dynapipe.megatron.equip import halves

            _originals.install(halves.TABLE)


def _check_device() -> None:
    """Refuse to go on without a GPU and without its stubs: Megatron would print all its arguments first."""
    if not (cpu.is_enabled() or torch.cuda.is_available()):
        raise ConfigError(
            "expected a CUDA device, found none",
            hint="to try a patched checkout on the CPU, launch its script by this project's module:"
            " torchrun --nproc-per-node 2 -m megatron_dynapipe.cpu pretrain_gpt.py YOUR FLAGS",
        )


def _check_model_flags() -> None:
    """Refuse flags of this project's models: a patched checkout builds its own."""
    flags = {argument.partition("=")[0] for argument in sys.argv[1:]}
    for flag, instead in (
        ("--dynapipe-attention", "leave it out"),
        ("--dynapipe-activation", "leave it out"),
        ("--dynapipe-softmax-scale", "leave it out"),
        ("--dynapipe-elastic", "use this project's entry scripts"),
    ):
        if flag in flags:
            raise ConfigError(
                f"{flag} is not supported in a patched checkout, which builds its own model", hint=instead
            )


def _check_timers(args: argparse.Namespace, *, on_cpu: bool) -> None:
    """Refuse timers that a patched checkout's own step function starts inside an iteration (see `hooks.timers`)."""
    from megatron_dynapipe.megatron.hooks.timers import LOG_LEVEL

    if args.timing_log_level >= LOG_LEVEL and args.pipeline_model_parallel_size > 1 and not on_cpu:
        raise ConfigError(
            f"--timing-log-level {args.timing_log_level} would stop all stages of a patched checkout: its step function"
            " synchronises the device, on which receives wait for other stages",
            hint="use --timing-log-level 1, or this project's entry scripts",
        )


def dataset_provider(stock: Callable[..., object]) -> Callable[..., object]:
    """The provider of datasets for `pretrain`: a planned run's iterators, else the entry script's own provider."""
    from megatron.training import get_args, training

    global _run
    args = get_args()
    if not args.use_dynapipe or active_run.is_active():
        return stock
    with reported():
        from megatron_dynapipe.megatron.entry.script import patched_run

        if start.ranks_stand_alone():  # no store before now
            check_same_flags(_flags, ControlGroup(timeout_s=args.dynapipe_timeout_s))
        run = patched_run(args, ModelFamily.GPT)
        active_run.activate(run)
        _originals.install(replacements.TABLE)
    for name in ("train_step", "evaluate"):
        _originals.replace(training, name, reported()(getattr(training, name)))
    _run = run
    atexit.register(_close, SystemExit(1))

    def datasets(samples: object, vp_stage: int | None = None) -> object:
        with reported():
            return run.datasets(samples, vp_stage)

    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every tensor-parallel rank
    return datasets


def finish() -> None:
    """At the end of `pretrain`: print the summary of a run that this module started, and close it."""
    if _run is not None:
        with reported():
            _run.print_report()
        _close()


def _close(error: BaseException | None = None) -> None:
    """End the run that was started here: as one that has come to its end, or with an error."""
    global _run
    if _run is not None:
        run = _run
        _run = None
        run.__exit__(None if error is None else type(error), error, None)
        _originals.revert()
        repairs.revert()
        active_run.deactivate()
