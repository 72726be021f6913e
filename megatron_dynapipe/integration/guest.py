"""What Megatron's code calls once DynaPipe is in it: through the run-time seam (`seam`) or through `patches/`.

One run is in force at a time. Until there is one, every function here answers as Megatron alone would, so that a
patched checkout without `--use-dynapipe` trains as before. Nothing of Megatron is imported before it is needed: its
own modules import this one.
"""

import argparse
import atexit
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_dynapipe import config, cpu
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration import arguments, mends
from megatron_dynapipe.integration.bootstrap import reported
from megatron_dynapipe.units import ModelFamily

if TYPE_CHECKING:
    from megatron_dynapipe.integration.session import Session

_session: "Session | None" = None
_is_ours = False
"""Whether the run in force was started here, in a patched checkout, and is to be ended here."""


def activate(session: "Session") -> None:
    """Put a run in force; raises ConfigError if there is one."""
    global _session
    if _session is not None:
        raise ConfigError("expected no planned run to be in force yet, got a second one")
    _session = session


def deactivate() -> None:
    """No run is in force from now on."""
    global _session
    _session = None


# Called from Megatron's training loop.


def schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The schedule function that `train` and `evaluate` are to call: the run's, else Megatron's own."""
    if _session is None:
        return stock
    return reported()(_session.forward_backward) if _is_ours else _session.forward_backward


def micro_batch_shape(size: int, length: int) -> tuple[int, int]:
    """Samples and positions of the micro-batch whose pass is running, else those that Megatron says."""
    if _session is None or _session.shape is None:
        return size, length
    return _session.shape.size, _session.shape.input_length


def count_samples(args: argparse.Namespace) -> None:
    """Megatron has counted `--global-batch-size` samples for the iteration that ended: make it those of the plan."""
    if _session is not None:
        args.consumed_train_samples += _session.samples - args.global_batch_size


def log_text() -> str:
    """What is added to Megatron's line of an iteration."""
    return "" if _session is None else _session.log_text()


# Called from patched checkouts alone: this project's entry scripts do the same for themselves (`runs`).


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DynaPipe's flags and write the run file out into the command line.

    With `--use-dynapipe` Megatron's defaults become those of a planned run, and bad flags end it with one line.
    """
    arguments.add_flags(parser)
    with reported():
        sys.argv[1:] = config.expand(sys.argv[1:], arguments.switches(parser))
    if "--use-dynapipe" in sys.argv[1:]:
        arguments.add_arguments(parser)
        parser.error = reported()(parser.error)  # type: ignore[method-assign]
        if cpu.is_enabled():
            cpu.set_args_defaults(parser)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what a planned run cannot honour, and fill in the dataset's tokenizer; ends the process with one line.

    From here on Megatron's optimizer is mended: a checkpoint is loaded before the run is in force.
    """
    if not args.use_dynapipe:
        return
    with reported():
        mends.apply()
        settings = arguments.check(args, ModelFamily.GPT)
        _check_model_flags(args)
        _check_timers(args, on_cpu=cpu.is_enabled())
        if args.tokenizer_model is None:
            args.tokenizer_model = str(settings.data / read_meta(settings.data).tokenizer)


def _check_model_flags(args: argparse.Namespace) -> None:
    """Refuse flags of this project's models: a patched checkout builds its own."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    for flag, instead in (
        ("--dynapipe-attention", "leave it out"),
        ("--dynapipe-layers-per-stage", "pass --pipeline-model-parallel-layout"),
    ):
        if flag in given:
            raise ConfigError(f"{flag} is not of a patched checkout, which builds its own model", hint=instead)
    if arguments.layer_split_words(args, ModelFamily.GPT):
        raise ConfigError(
            "--dynapipe-layer-to-device cannot split the model of a patched checkout unequally",
            hint="pass --pipeline-model-parallel-layout",
        )


def _check_timers(args: argparse.Namespace, *, on_cpu: bool) -> None:
    """Refuse timers that a patched checkout's own step function starts between passes (see `timers`)."""
    from megatron_dynapipe.integration.timers import LOG_LEVEL

    if args.timing_log_level >= LOG_LEVEL and args.pipeline_model_parallel_size > 1 and not on_cpu:
        raise ConfigError(
            f"--timing-log-level {args.timing_log_level} would stop all stages of a patched checkout: its step function"
            " waits for the device, on which receives wait for other stages",
            hint="use --timing-log-level 1, or this project's entry scripts",
        )


def dataset_provider(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What `pretrain` is to ask for datasets: a planned run's iterators, else the entry script's own provider."""
    from megatron.training import get_args

    global _is_ours
    args = get_args()
    if not args.use_dynapipe or _session is not None:
        return stock
    with reported():
        from megatron_dynapipe.integration import runs

        session = runs.patched_session(args)
        activate(session)
    _is_ours = True
    atexit.register(_close)

    def datasets(samples: Any, vp_stage: int | None = None) -> Any:
        with reported():
            return session.datasets(samples, vp_stage)

    datasets.is_distributed = True  # type: ignore[attr-defined]
    return datasets


def finish() -> None:
    """At the end of `pretrain`: print the summary of a patched checkout's run and stop what it has started."""
    if _session is not None and _is_ours:
        with reported():
            _session.print_report()
        _close()


def _close() -> None:
    global _is_ours
    if _session is not None and _is_ours:
        _session.__exit__()
        mends.take_back()
        _is_ours = False
        deactivate()
