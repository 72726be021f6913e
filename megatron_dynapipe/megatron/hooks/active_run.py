"""The planned run that is active in this process, and what Megatron's training loop asks of it.

At most one run is active. Without one, every function here answers as Megatron alone would, so that a patched
checkout without `--use-dynapipe` trains as before.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from megatron_dynapipe.core.errors import ConfigError, UnsupportedMegatronError
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.runtime import process_groups


class IterationLog(Protocol):
    """What a run says of its latest training iteration."""

    @property
    def samples(self) -> int:
        """Its samples."""

    def flops(self, count: float) -> float:
        """Its floating-point operations, from their number over whole samples."""

    def stepped(self) -> None:
        """The optimizer has stepped after it."""

    def text(self) -> str:
        """What was planned and measured, in the form of Megatron's log line."""


class PlannedRun(Protocol):
    """A run, as Megatron's training loop needs it."""

    timeout_s: float
    """Deadline of every wait in an iteration."""

    @property
    def shape(self) -> Shape | None:
        """The shape of the micro-batch that is running; None before the first."""

    @property
    def log(self) -> IterationLog | None:
        """None before the run has started."""

    @property
    def forward_backward(self) -> Callable[..., object]:
        """Megatron's schedule function: runs one planned iteration."""

    def evaluation(self, data_iterator: object) -> int:
        """Batches of an evaluation on the split of an iterator."""


COUNTERS = ("iteration", "consumed_train_samples")
"""Attributes of Megatron's namespace by which its loop counts."""
LOSS_NAME = "lm loss"
"""Under which Megatron logs the loss."""

_run: PlannedRun | None = None


def activate(run: PlannedRun) -> None:
    """Make a run the active one; raises ConfigError if there is one already."""
    global _run
    if _run is not None:
        raise ConfigError("expected no planned run to be active yet, got a second one")
    _run = run


def deactivate() -> None:
    """No run is active from now on."""
    global _run
    _run = None


def is_active() -> bool:
    """Whether a run is active."""
    return _run is not None


def _log() -> IterationLog | None:
    return None if _run is None else _run.log


def schedule(stock: Callable[..., object]) -> Callable[..., object]:
    """The schedule function that `train` and `evaluate` call: the active run's, else Megatron's own."""
    return stock if _run is None else _run.forward_backward


def micro_batch_shape(size: int, length: int) -> tuple[int, int]:
    """Samples and positions of the micro-batch that is running, else the nominal ones."""
    if _run is None or _run.shape is None:
        return size, length
    return _run.shape.size, _run.shape.input_length


def counters(args: argparse.Namespace) -> Any:
    """The object that holds the `COUNTERS` of Megatron's loop: its namespace, from which they are to move away (#3554).

    Raises:
        UnsupportedMegatronError: they have moved.
    """
    if missing := [name for name in COUNTERS if not hasattr(args, name)]:
        raise UnsupportedMegatronError(f"expected {' and '.join(missing)} in Megatron's arguments, found none")
    return args


def stepped() -> None:
    """Megatron's step of training is done: the active run's clock may say when."""
    if (log := _log()) is not None:
        log.stepped()


def count_samples(args: argparse.Namespace) -> None:
    """Correct Megatron's count of samples, which adds `--global-batch-size` per iteration, to the plan's number."""
    if (log := _log()) is not None:
        counters(args).consumed_train_samples += log.samples - args.global_batch_size


def flops(count: float) -> float:
    """Floating-point operations of an iteration: Megatron's count, less what the active run left out."""
    return count if (log := _log()) is None else log.flops(count)


def evaluation(data_iterator: object, batches: int | None) -> int | None:
    """Batches of an evaluation: the active run's, else as given."""
    return batches if _run is None else _run.evaluation(data_iterator)


def bounded_waits(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Around an iteration: Megatron's groups have the run's deadline there, and their own for checkpoints."""
    if _run is None:
        return nullcontext()
    later = args.distributed_timeout_seconds_after_init
    return process_groups.bounded_waits(
        _run.timeout_s, 60 * args.distributed_timeout_minutes if later is None else later
    )


def text() -> str:
    """What the active run says of its latest training iteration; empty without one."""
    return "" if (log := _log()) is None else log.text()
