"""Replacements in Megatron's modules at run time: one table of names, on request, reversibly.

A patched checkout installs the same table (`entry/checkout.py`).
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_dynapipe.cpu.platform import resolve
from megatron_dynapipe.megatron.hooks import active_run, repairs
from megatron_dynapipe.megatron.hooks.active_run import PlannedRun
from megatron_dynapipe.megatron.hooks.extra_states import with_empty_states
from megatron_dynapipe.megatron.hooks.originals import Originals, Replacement
from megatron_dynapipe.megatron.hooks.saved_tensors import without_strides
from megatron_dynapipe.processes import set_parent_death_signal

_FIRST = "is_first_iteration"


def _planning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def get_forward_backward_func(*arguments: object, **keywords: object) -> Callable[..., Any]:
        return active_run.schedule(factory(*arguments, **keywords))

    return get_forward_backward_func


def _stepping(train_step: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(train_step)
    def step(*arguments: object, **keywords: object) -> Any:
        from megatron.training import get_args

        args = get_args()
        with active_run.bounded_waits(args):
            result = train_step(*arguments, **keywords)
            active_run.stepped()
        active_run.count_samples(args)
        return result

    return step


def _counting(num_floating_point_operations: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(num_floating_point_operations)
    def count(*arguments: object, **keywords: object) -> float:
        return active_run.flops(num_floating_point_operations(*arguments, **keywords))

    return count


def _evaluating(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def planned_evaluation(forward_step_func: Any, data_iterator: Any, *arguments: Any, **keywords: Any) -> Any:
        from megatron.training import get_args, training

        batches = active_run.evaluation(data_iterator, keywords.get("eval_iters"))
        with active_run.bounded_waits(get_args()):
            result = evaluate(forward_step_func, data_iterator, *arguments, **keywords | {"eval_iters": batches})
        if result[0] and not result[0].get(active_run.LOSS_NAME, 1.0):
            training.print_rank_last("no token of the following evaluation counts")
        return result

    return planned_evaluation


def _logging(training_log: Callable[..., object]) -> Callable[..., object]:
    """Have a line of the run follow Megatron's, and the first iteration of a start end an interval of its own.

    Megatron counts the first iteration, which has a line, in the next line again.
    """
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log(*arguments: object, **keywords: object) -> Any:
        from megatron.training import get_args, training

        bound = signature.bind(*arguments, **keywords)
        iteration = bound.arguments["iteration"]
        ends_interval = iteration % get_args().log_interval == 0
        if bound.arguments.get(_FIRST) and ends_interval:
            bound.arguments[_FIRST] = False
        result = training_log(*bound.args, **bound.kwargs)
        if ends_interval and (text := active_run.text()):
            training.print_rank_last(f" iteration {iteration} planned:{text}")
        return result

    return log


def _shaping(get_batch_on_this_tp_rank: Callable[..., object]) -> Callable[..., object]:
    """Ranks that receive a batch allocate it by the shape that they are told, and each knows the plan's."""
    signature = inspect.signature(get_batch_on_this_tp_rank)

    @functools.wraps(get_batch_on_this_tp_rank)
    def batch(*arguments: object, **keywords: object) -> Any:
        bound = signature.bind(*arguments, **keywords)
        size, length = (bound.arguments[name] for name in _SHAPE)
        bound.arguments.update(zip(_SHAPE, active_run.micro_batch_shape(size, length), strict=True))
        return get_batch_on_this_tp_rank(*bound.args, **bound.kwargs)

    return batch


_SHAPE = ("micro_batch_size", "seq_length")


def _reading(get_batch_on_this_tp_rank: Callable[..., object]) -> Callable[..., object]:
    """The original takes all tensors on every stage and broadcasts them in the shape of flags; ranks have their own."""

    @functools.wraps(get_batch_on_this_tp_rank)
    def batch(data_iterator: Iterator[dict[str, Any]], *_arguments: object, **_keywords: object) -> dict[str, Any]:
        return dict(next(data_iterator))

    return batch


def _compiling(compile_helpers: Callable[..., None]) -> Callable[..., None]:
    """Leave out what a wheel has no Makefile for: helpers of Megatron's datasets, which planned runs do not use."""
    makefile = Path(inspect.getfile(compile_helpers)).with_name("Makefile")
    return compile_helpers if makefile.is_file() else lambda: None


def _ending_with_its_rank(get_write_results_queue: Callable[..., object]) -> Callable[..., object]:
    """Have the process that holds the queue end with this rank, however it ends; Megatron's would stay for ever."""
    queues: list[object] = []

    @functools.wraps(get_write_results_queue)
    def results_queue(mp_mode: str = "spawn") -> object:
        if not queues:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(set_parent_death_signal, (signal.SIGKILL,))
            queues.append(manager.Queue())
        return queues[0]

    return results_queue


_WRITER = "megatron.core.dist_checkpointing.strategies.async_utils.PersistentAsyncCaller"


def _write_until_the_rank_ends(*arguments: object) -> None:
    """Run Megatron's own loop, in the process that a fork server starts for it: this module is imported anew there."""
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], daemon=True).start()
    resolve(_WRITER).async_loop(*arguments)


def _end_with(rank: BaseProcess) -> None:
    """End this process after the one that asked for it: its parent in the kernel's eyes, the server, goes on."""
    rank.join()
    os._exit(1)


TABLE: tuple[Replacement, ...] = (
    Replacement(
        owner="megatron.core.pipeline_parallel.schedules",
        name="get_forward_backward_func",
        make=_planning,
        parameters=(),
        everywhere=True,
        why="the factory by which train and evaluate pick a schedule function",
    ),
    Replacement(
        owner="megatron.training.training",
        name="train_step",
        make=_stepping,
        parameters=("forward_step_func", "data_iterator", "model", "forward_backward_func"),
        why="a nominal number of samples is counted after it, and its collectives have a checkpoint's deadline",
    ),
    Replacement(
        owner="megatron.training.training",
        name="evaluate",
        make=_evaluating,
        parameters=("forward_step_func", "data_iterator", "eval_iters"),
        why="runs as many batches of every split; ours evaluate on all of a split that has fewer",
    ),
    Replacement(
        owner="megatron.training.training",
        name="num_floating_point_operations",
        make=_counting,
        parameters=("args", "batch_size"),
        why="counts the last MLP and the head of all positions, also of positions without a label, which are left out",
    ),
    Replacement(
        owner="megatron.training.training",
        name="training_log",
        make=_logging,
        parameters=("iteration",),
        why="says nothing of plans; after a start, its second line is the mean of two iterations",
    ),
    Replacement(
        owner="megatron.core.utils",
        name="get_batch_on_this_tp_rank",
        make=_shaping,
        parameters=_SHAPE,
        everywhere=True,
        why="scripts of checkouts broadcast a micro-batch by it, in the shape that flags say",
    ),
    Replacement(
        owner="megatron.training.utils.common_utils",
        name="get_batch_on_this_tp_rank",
        make=_reading,
        parameters=("data_iterator",),
        everywhere=True,
        optional=True,
        why="pretrain_gpt.py of the branch dev takes a micro-batch by it",
    ),
    Replacement(
        owner="megatron.core.datasets.utils",
        name="compile_helpers",
        make=_compiling,
        parameters=(),
        why="initialize_megatron runs make in the package's folder and ends the process where that fails",
    ),
    Replacement(
        owner="megatron.core.dist_checkpointing.serialization",
        name="load",
        make=with_empty_states,
        parameters=("sharded_state_dict", "checkpoint_dir"),
        everywhere=True,
        why="stops where a checkpoint of local layers lacks the empty states of Transformer Engine's",
    ),
    Replacement(
        owner="megatron.core.dist_checkpointing.strategies.torch.TorchDistLoadShardedStrategy",
        name="load_tensors_metadata",
        make=without_strides,
        parameters=("self", "checkpoint_dir", "metadata"),
        why="hands what PyTorch 2.15 says of a tensor's strides to torch.empty, which takes none",
    ),
    Replacement(
        owner="megatron.core.dist_checkpointing.strategies.filesystem_async",
        name="get_write_results_queue",
        make=_ending_with_its_rank,
        parameters=("mp_mode",),
        everywhere=True,
        why="starts a process of half a GB that outlives a rank that is killed",
    ),
    Replacement(
        owner=_WRITER,
        name="async_loop",
        make=lambda loop: _write_until_the_rank_ends,
        parameters=("rank", "queue", "preload_q", "comp_q"),
        why="--use-persistent-ckpt-worker runs it in a process that outlives a rank that is killed",
    ),
)
"""Everything that is replaced in Megatron while a planned run trains."""


@contextlib.contextmanager
def installed(run: PlannedRun) -> Iterator[None]:
    """For the length of a block Megatron's training loop takes a run's schedule, and logs and counts what it did.

    Raises:
        ConfigError: a run is active already.
    """
    active_run.activate(run)
    repairs.apply()
    originals = Originals()
    originals.install(TABLE)
    try:
        yield
    finally:
        originals.revert()
        repairs.revert()
        active_run.deactivate()
