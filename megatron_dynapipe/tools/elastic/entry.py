"""`--dynapipe-elastic`: the layout for as many ranks as there are, resuming, leaving on notice.

    rank 0        parses the flags as for one rank, and chooses the layout for all
    all ranks     go on with the layout's flags, from the last checkpoint

torchrun starts all ranks anew when one is lost, when a node comes, or when they leave on notice: SIGTERM, which its
agents send to their ranks. Megatron's `--exit-signal-handler` tells all ranks of it after an iteration, has the
checkpoint saved and ends the run; ranks then end with a status that is no success, or torchrun would end the job.
"""

import argparse
import contextlib
import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from megatron_dynapipe.config import EarlyFlags, early_flags
from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.integration.entry import failure
from megatron_dynapipe.integration.entry.checkpoint_lock import lock
from megatron_dynapipe.outputs import replace_bytes, unwritten
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.runtime.start_store import renew
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.elastic.layout import agreed_layout
from megatron_dynapipe.tools.elastic.run import LEFT, SAVE_EVERY
from megatron_dynapipe.tools.tuning import Space, TunedLayout, tune
from megatron_dynapipe.units import ModelFamily

ELASTIC = "--dynapipe-elastic"
LAYOUT_FLAGS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
    *("--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout", "--dynapipe-layers-per-stage"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
)
"""Flags that take one value and are chosen here; what the user gives of them has no effect."""
HANDLER = "--exit-signal-handler"
SAVING = ".dynapipe-saving"
"""In the folder of emergency checkpoints: the iteration whose checkpoint this job began to save last."""
BATCHES = 2
"""Global batches by which layouts are judged."""

_has_notice = False
"""Whether some rank has had a notice; the same on all ranks, after the iteration in which they agreed on it."""


def adapting(family: ModelFamily, main: Callable[[], None]) -> Callable[[], None]:
    """`main` of an entry script, in the layout that fits the ranks that are there if `--dynapipe-elastic` is given."""

    def run() -> None:
        prepare(family)
        with status():
            main()

    return run


def prepare(family: ModelFamily) -> None:
    """Give the command line the layout that fits the ranks that are there. Does nothing without `--dynapipe-elastic`.

    Raises:
        ConfigError: no layout fits, or a flag that elastic runs need is missing.
    """
    from megatron_dynapipe.integration.flags import command_line

    argv = command_line.expanded(sys.argv[1:])
    if ELASTIC not in argv:
        return
    end_with_launcher(signal.SIGKILL)  # SIGTERM would be a notice, and the rank would go on to save
    _take_notices()
    argv = _resumable(argv)
    argv += _saving_flags(argv)
    timeout_s = early_flags(argv, EarlyFlags).dynapipe_timeout_s
    renew(timeout_s)
    layout = agreed_layout(
        lambda ranks: _choose(family, argv, ranks, timeout_s), timeout_s=timeout_s, describe=_description
    )
    sys.argv[1:] = [word for word in argv if word != ELASTIC] + layout_flags(layout)


@contextlib.contextmanager
def status() -> Iterator[None]:
    """Around a run: a rank that leaves on notice ends with a status by which torchrun starts it anew where it stays."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or not _has_notice:
            raise
        _leave()


def layout_flags(layout: TunedLayout) -> list[str]:
    """A layout as flags of a run."""
    flags = ["--tensor-model-parallel-size", str(layout.tensor_parallel)]
    flags += ["--pipeline-model-parallel-size", str(layout.pipeline_parallel)]
    if layout.pipeline_parallel > 1:
        flags += ["--dynapipe-layers-per-stage", ",".join(map(str, layout.layers_per_stage or ()))]
    return flags


def _description(layout: TunedLayout) -> str:
    stages = ",".join(map(str, layout.layers_per_stage or ()))
    return (
        f"{layout.data_parallel} replicas × {layout.tensor_parallel} tensor-parallel × {layout.pipeline_parallel}"
        f" stages ({stages} layers), {layout.predicted_ms:.0f} ms an iteration predicted"
    )


def _leave() -> NoReturn:
    """End at once: taking down an interpreter with this many modules takes a second, for which all others wait."""
    failure.leave(LEFT)
    sys.exit(LEFT)


def _take_notices() -> None:
    """After every iteration, see what ranks agreed on; keep torchrun's signal from what saves.

    torchrun sends SIGTERM to all processes of a rank's group. Megatron's writers tell what they wrote over a process
    that would end by it, and the checkpoint would fail: it is started with the signal blocked, which is inherited.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import get_args
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    received = DistributedSignalHandler.signals_received

    def signals_received(handler: DistributedSignalHandler) -> Any:
        global _has_notice
        notices = received(handler)
        _has_notice = _has_notice or any(notices)
        note_save(get_args())
        return notices

    DistributedSignalHandler.signals_received = signals_received
    results_queue = filesystem_async.get_write_results_queue

    @functools.wraps(results_queue)  # start-up looks at its parameters
    def get_write_results_queue(*arguments: Any, **keywords: Any) -> Any:
        resource_tracker.ensure_running()  # whose start unblocks the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return results_queue(*arguments, **keywords)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    filesystem_async.get_write_results_queue = get_write_results_queue


def note_save(args: argparse.Namespace) -> None:
    """Before Megatron saves an emergency checkpoint, record which; called on every rank after every iteration."""
    iteration = args.curr_iteration + 1
    every, lasting = args.non_persistent_save_interval, args.save_interval
    if args.rank != 0 or args.non_persistent_ckpt_type != "global" or not every or iteration % every:
        return
    if not (lasting and iteration % lasting == 0):
        folder = Path(args.non_persistent_global_ckpt_dir or Path(args.save, "non_persistent"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(folder / SAVING, f"{iteration}\n".encode())
        except OSError as error:
            raise unwritten(folder, error) from error


def delete_unfinished(folder: Path) -> None:
    """Delete the emergency checkpoint that this job began and did not complete; no rank may be saving.

    Megatron keeps the one of the highest iteration, complete or not, and deletes the others before it saves again.

    Args:
        folder: of emergency checkpoints. Where its tracker cannot be read, nothing is deleted.
    """
    from megatron_dynapipe.integration.flags.resume_record import checkpoint_of, last_iteration

    begun, complete = last_iteration(folder, SAVING), last_iteration(folder)
    path = checkpoint_of(folder, begun)
    if begun is None or complete is None or begun <= complete or path is None or path.is_symlink():
        return
    shutil.rmtree(path, ignore_errors=True)


def _resumable(argv: Sequence[str]) -> list[str]:
    """The command line without a layout, with what makes it resume.

    Raises:
        ConfigError: there is no folder for checkpoints, or they would be of a kind that has one layout.
    """
    from megatron_dynapipe.integration.flags import command_line

    given = [flag for argument in argv if (flag := argument.partition("=")[0]) in LAYOUT_FLAGS]
    if given and os.environ.get("RANK", "0") == "0":
        print(f"without effect with {ELASTIC}, which chooses the layout: {', '.join(given)}", flush=True)
    argv = command_line.without(argv, LAYOUT_FLAGS)
    early = early_flags(argv, EarlyFlags)
    if not early.save:
        raise ConfigError(f"expected --save DIR with {ELASTIC}, got none", hint="a folder that all nodes see")
    if not early.save_interval:
        raise ConfigError("expected --save-interval N with --save, got none", hint="iterations between checkpoints")
    if (kind := early.ckpt_format) != "torch_dist":
        raise ConfigError(
            f"expected --ckpt-format torch_dist with {ELASTIC}, got {kind}", hint="others load in one layout alone"
        )
    if early.context_parallel_size > 1:
        raise ConfigError(f"{ELASTIC} knows no layouts with context parallelism", hint="remove --context-parallel-size")
    return [*argv, *resuming(argv, Path(early.save))]


def resuming(argv: Sequence[str], saved: Path) -> list[str]:
    """Flags that resume what this job has saved, whatever it first began from; none before it has."""
    from megatron_dynapipe.integration.flags.megatron_flags import TRACKER

    if not any((folder / TRACKER).exists() for folder in (saved, _emergency_folder(argv, saved))):
        return []
    if early_flags(argv, EarlyFlags).finetune:
        raise ConfigError(
            f"{saved} holds checkpoints of this job, and --finetune would begin from them anew",
            hint="leave --finetune out when a job is resumed, or --save in an empty folder",
        )
    return ["--load", str(saved)]


def _emergency_folder(argv: Sequence[str], saved: Path) -> Path:
    return Path(early_flags(argv, EarlyFlags).non_persistent_global_ckpt_dir or saved / "non_persistent")


def _saving_flags(argv: Sequence[str]) -> list[str]:
    """Flags by which every checkpoint can be loaded in every layout, on notice and every few iterations."""
    added = [HANDLER]
    if "--use-distributed-optimizer" in argv:
        added += ["--dist-ckpt-optim-fully-reshardable"]
    if not any(argument.startswith("--non-persistent-") for argument in argv):
        added += ["--non-persistent-save-interval", str(SAVE_EVERY), "--non-persistent-ckpt-type", "global"]
    return added


def _choose(family: ModelFamily, argv: Sequence[str], ranks: int, timeout_s: float) -> TunedLayout:
    saved = early_flags(argv, EarlyFlags).save
    lock(saved, timeout_s)
    delete_unfinished(_emergency_folder(argv, Path(saved)))
    with _one_rank(argv):
        base, space, costs, batches = _choices(family, ranks)
    try:
        return tune(base, costs, batches, space, top=1).layouts[0]
    except InfeasibleError as error:
        raise ConfigError(error.message, hint=error.hint) from error


def _choices(family: ModelFamily, ranks: int) -> tuple[PlannerSettings, Space, CostModel, list[GlobalBatch]]:
    """What there is to choose from, by which costs, for which batches: from the command line of one rank."""
    from megatron_dynapipe.integration.flags import command_line
    from megatron_dynapipe.service.loop import split_sampler

    args, run = command_line.parse(family, sys.argv[1:])
    inputs = run.inputs
    sampler = split_sampler(run.data, inputs.splits[0])
    space = Space(
        devices=ranks,
        tensor_sizes=_tensor_sizes(args, ranks),
        distributed_optimizer=run.planner.distributed_optimizer,
        global_batch_size=None if args.tokens_per_global_batch else args.global_batch_size,
    )
    count = sampler.batches.count
    batches = [sampler.batch(at) for at in range(min(BATCHES, count or BATCHES))]
    return inputs.planner, space, inputs.costs.load(), batches


def _tensor_sizes(args: argparse.Namespace, most: int) -> tuple[int, ...]:
    """Sizes that divide the model, and under which the vocabulary is padded to the same size."""
    divided = (args.num_attention_heads, args.num_query_groups or args.num_attention_heads, args.ffn_hidden_size)
    return tuple(
        size
        for size in range(1, most + 1)
        if not any(number % size for number in divided)
        and args.padded_vocab_size % (args.make_vocab_size_divisible_by * size) == 0
    )


@contextlib.contextmanager
def _one_rank(argv: Sequence[str]) -> Iterator[None]:
    """The command line and the environment of a run of one rank, for the length of a block.

    Parsing sets Megatron's global variables, a signal handler among them: there is to be none yet.
    """
    from megatron.training.global_vars import unset_global_variables

    before, world = sys.argv[1:], os.environ.get("WORLD_SIZE", "1")
    os.environ["WORLD_SIZE"] = "1"
    sys.argv[1:] = [each for each in argv if each != HANDLER]
    try:
        yield
    finally:
        unset_global_variables()
        sys.argv[1:], os.environ["WORLD_SIZE"] = before, world
