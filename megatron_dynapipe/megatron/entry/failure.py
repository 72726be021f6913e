"""How a rank ends that fails: it says so first, tells its peers, and leaves its process groups without waiting.

`destroy_process_group` waits for what is pending. After an error on the host that is a receive whose sender waits for
this rank: the error would never be printed, and NCCL's watchdog would end the process with a message of its own.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dynapipe.config import early_flags
from megatron_dynapipe.core.errors import (
    ConfigError,
    CostModelError,
    DataError,
    DynaPipeError,
    ExecutionError,
    UnsupportedMegatronError,
)
from megatron_dynapipe.megatron.entry import start
from megatron_dynapipe.megatron.entry.leaving import leave_report_to_another_rank, write_error_file
from megatron_dynapipe.megatron.flags.checkpoints import last_iteration
from megatron_dynapipe.outputs import unwritten
from megatron_dynapipe.runtime.start_store import says_first
from megatron_dynapipe.runtime.watchdog import silent_ranks

FIRST_FAILURE = "dynapipe/first_failure"
"""Key of the process groups' store: the first failure of the job, in one line."""
_INTERRUPTED = 128 + signal.SIGINT
SAVING = {"save_checkpoint", "maybe_finalize_async_save"}
"""Megatron's functions that write a checkpoint."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A `DynaPipeError` of the block ends the process with a message and no traceback. Also a decorator.

    Exit status 2 means that the run could not start as it was asked to, 1 that it failed later. What keeps a run from
    starting is the same on all ranks, or agreed on by them: one rank prints it. After Ctrl-C it is 130.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except (ConfigError, CostModelError, DataError, UnsupportedMegatronError) as error:
        if not (start.reports_for_all() or getattr(error, start.REPORTED_HERE, False)):
            leave_report_to_another_rank(2)
        _print_report(error, "" if rank == 0 else f"[rank {rank}] ")
        write_error_file(str(error))
        sys.exit(2)
    except DynaPipeError as error:
        _print_report(error, f"[rank {rank}] ")
        write_error_file(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        if rank == 0:
            print(f"interrupted; {_last_checkpoint()}", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED)


def _last_checkpoint() -> str:
    saved = early_flags(sys.argv[1:]).save
    last = last_iteration(Path(saved)) if saved else None
    if last is None:
        return "no checkpoint was saved: --save FOLDER and --save-interval N save some"
    return f"the last checkpoint is of iteration {last}: --load {saved} goes on from it"


def _print_report(error: DynaPipeError, prefix: str) -> None:
    more = [f"hint: {error.hint}"] if error.hint is not None else []
    more += getattr(error, "__notes__", ())
    rest = "\n".join(more)
    if rest and not says_first(rest):
        rest = ""  # another rank has the same error
    print(f"{prefix}error: {error.message}" + f"\n{rest}" * bool(rest), file=sys.stderr, flush=True)


@contextlib.contextmanager
def process_groups() -> Iterator[None]:
    """Destroy the process groups that Megatron made, at the end of the block; abort them if it fails.

    An exception is printed, with the rank and the failure that was the job's first, before anything is waited for. It
    ends the process with status 1 (2 where `reported` says so).
    """
    try:
        yield
    except BaseException as error:
        status = _print_error(error)
        if status == 0:
            _destroy()
            raise
        abort()
        leave(status)
        sys.exit(status)
    else:
        _destroy()


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _print_error(error: BaseException) -> int:
    """Print an error of this rank; the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    error = _explained(error)
    _name_first_failure(error)
    try:
        with reported():
            raise error
    except SystemExit as leaving:
        return int(leaving.code or 1)
    except BaseException:  # noqa: BLE001  (whatever it is, the error file must be written)
        print(f"[rank {_rank()}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        write_error_file(_line(error))
        return 1


def _explained(error: BaseException) -> BaseException:
    """An error of Megatron's that its users meet and that has a way out; others as they are."""
    if (explained := _with_a_way_out(error)) is None:
        return error
    explained.__cause__ = error
    return explained


def _with_a_way_out(error: BaseException) -> DynaPipeError | None:
    if isinstance(error, AssertionError) and "OptimizerParamScheduler: class input value" in str(error):
        match = re.search(r"value (\S+) and checkpoint ?value (\S+) for (.+) do not match", str(error))
        value, saved, name = match.groups() if match else ("another", "its own", "a value")
        name = name.replace("iterations", "samples")  # which its numbers are
        return ConfigError(
            f"expected the checkpoint's {name}, {saved}, got {value}",
            hint="--override-opt-param-scheduler trains on with the values of this command line (another --train-iters"
            " or --lr), --use-checkpoint-opt-param-scheduler with the checkpoint's",
        )
    if "router.expert_shares" in str(error):
        return ConfigError(
            "the checkpoint has no shares of experts, from which aux_loss begins: it was saved without"
            " --moe-aux-loss-coeff",
            hint="--dist-ckpt-strictness log_unexpected begins with equal shares, and warns of what else is missing",
        )
    if "Missing key in checkpoint" in str(error) and "_extra_state" in str(error):
        return ConfigError(
            "the checkpoint lacks states of Transformer Engine's layers: it was saved with local ones",
            hint="--dist-ckpt-strictness log_unexpected begins with empty states, and warns of what else is missing",
        )
    if isinstance(error, RuntimeError) and (waited := re.search(r"gloo.*Timed out waiting (\d+)ms", str(error))):
        late = ExecutionError(
            f"waited {int(waited[1]) / 1000:.0f} s for another rank, which still runs but does not answer"
            f"{silent_ranks()}",
            hint="look for a process that is stopped or a machine that is overloaded; --dynapipe-timeout-s and"
            " --distributed-timeout-minutes allow more time",
        )
        for note in getattr(error, "__notes__", ()):  # the instruction, which names the stage
            late.add_note(note)
        return late
    frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if frames & SAVING and isinstance(error, TypeError) and not early_flags(sys.argv[1:]).save:
        return ExecutionError(
            "Megatron has found a loss or a gradient that is no number, or that it cannot repeat (its lines are above),"
            " and there is no --save FOLDER for the checkpoint with which it ends a run",
            hint="lower --lr, or look at the samples; --no-check-for-nan-in-loss-and-grad goes on whatever comes",
        )
    is_archive = isinstance(error, RuntimeError) and "inline_container" in str(error)  # which torch writes
    if frames & SAVING and (is_archive or isinstance(error, OSError | CheckpointException)):
        return unwritten(Path(early_flags(sys.argv[1:]).save or "."), error)
    return None


def abort() -> None:
    """Leave all process groups; what is pending in them is given up."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # the process ends anyway, and its error has been printed
            dist.distributed_c10d._abort_process_group()


def leave(status: int) -> None:
    """End a process of torchrun's at once: threads and kernels of aborted groups can hold up the interpreter's end."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for helper in multiprocessing.active_children():  # Megatron's checkpoint writer has one, which would stay
            helper.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _name_first_failure(error: BaseException) -> None:
    """Write down this failure for the peers, or add to it the one that came before."""
    if not dist.is_initialized():
        return
    failure = f"rank {_rank()} failed first: {_line(error)}"
    with contextlib.suppress(Exception):  # the store may be gone with the rank that hosts it
        first = dist.distributed_c10d._get_default_store().compare_set(FIRST_FAILURE, "", failure).decode()
        if first != failure and not isinstance(error, DynaPipeError):
            error.add_note(first)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _rank() -> str:
    return os.environ.get("RANK", "0")
