"""A rank under `megatron-dynapipe launch`: the layout for as many ranks as there are, resuming, leaving on notice.

    rank 0        parses the flags as for one rank, and chooses the layout for all
    ranks of it   go on with the layout's flags
    others        stand by until the set of nodes changes, or the run ends

A notice is SIGTERM or SIGUSR1, to any rank: Megatron's `--exit-signal-handler` tells all ranks after an iteration, has
the checkpoint saved and ends the run; its ranks then end with the status by which agents know that they left.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from megatron_dynapipe.config import EarlyFlags, early_flags
from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.elastic.job import LEFT, Job
from megatron_dynapipe.elastic.layout import ElasticLayout, agree_on_layout, announce_end, choose_for_megatron
from megatron_dynapipe.elastic.run_folder import LOCK_SHARE, lock_folder
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.integration.entry import failure
from megatron_dynapipe.outputs import replace_bytes, unwritten
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning import Space
from megatron_dynapipe.units import ModelFamily

if TYPE_CHECKING:
    from megatron_dynapipe.integration.flags.run_config import RunConfig

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


def prepare(family: ModelFamily) -> None:
    """Give the command line the layout that fits the ranks that are there. Does nothing without `launch`.

    A rank that the layout has no use for does not return.

    Raises:
        ConfigError: no layout fits, or a flag that `launch` needs is missing.
    """
    job = Job.current()
    if job is None:
        return
    end_with_launcher(signal.SIGKILL)  # SIGTERM would be a notice, and the rank would go on to save
    _take_notices()
    argv = _resumable_flags()
    argv += _saving_flags(argv, job)
    timeout_s = early_flags(argv, EarlyFlags).dynapipe_timeout_s
    choice = agree_on_layout(lambda: _choose(family, argv, job, timeout_s), timeout_s=timeout_s)
    sys.argv[1:] = argv + choice.flags()


@contextlib.contextmanager
def status() -> Iterator[None]:
    """Around a run: a rank that leaves on notice ends with the status that says so; ranks that stand by end with it."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or not _has_notice:
            raise
        _leave()
    if Job.current() is not None and os.environ.get("RANK") == "0":
        announce_end()


def lock_checkpoints(run: "RunConfig") -> None:
    """Let this run alone save to `--save` until rank 0 ends, and to its folder of emergency checkpoints.

    Raises:
        ConfigError: on rank 0: another run does, or the folder cannot be written to.
    """
    if run.rank == 0 and run.checkpoints.save is not None:
        _lock(str(run.checkpoints.save), run.timeout_s)


def _lock(saved: str, timeout_s: float) -> None:
    if ":/" in saved:  # the URL of an object store, through Megatron's multi-storage client
        return
    try:
        lock_folder(Path(saved), wait_s=timeout_s * LOCK_SHARE)
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {saved}: {error.strerror}", hint="give --save a folder of yours"
        ) from error


def _leave() -> NoReturn:
    """End at once: taking down an interpreter with this many modules takes a second, for which all others wait."""
    failure.leave(LEFT)
    sys.exit(LEFT)


def _take_notices() -> None:
    """Take SIGUSR1 as SIGTERM, which Megatron's handler takes; after every iteration, see what ranks agreed on."""
    from megatron.training import get_args
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    received = DistributedSignalHandler.signals_received

    def signals_received(handler: DistributedSignalHandler) -> Any:
        global _has_notice
        found = received(handler)
        _has_notice = _has_notice or any(found)
        note_save(get_args())
        return found

    DistributedSignalHandler.signals_received = signals_received
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


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


def _resumable_flags() -> list[str]:
    """The command line without a layout, with what makes it resume.

    Raises:
        ConfigError: there is no folder for checkpoints, or they would be of a kind that has one layout.
    """
    from megatron_dynapipe.integration.flags import command_line

    argv = sys.argv[1:]
    given = [flag for each in argv if (flag := each.partition("=")[0]) in LAYOUT_FLAGS]
    if given and os.environ["RANK"] == "0":
        print(f"without effect under launch, which chooses the layout: {', '.join(given)}", flush=True)
    argv = command_line.without(argv, LAYOUT_FLAGS)
    early = early_flags(argv, EarlyFlags)
    if not early.save:
        raise ConfigError("expected --save DIR under launch, got none", hint="a folder that all nodes see")
    if not early.save_interval:
        raise ConfigError("expected --save-interval N with --save, got none", hint="iterations between checkpoints")
    if (kind := early.ckpt_format) != "torch_dist":
        raise ConfigError(
            f"expected --ckpt-format torch_dist under launch, got {kind}", hint="others load in one layout alone"
        )
    if early.context_parallel_size > 1:
        raise ConfigError("launch knows no layouts with context parallelism", hint="remove --context-parallel-size")
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


def _saving_flags(argv: Sequence[str], job: Job) -> list[str]:
    """Flags by which every checkpoint can be loaded in every layout, on notice and every few iterations."""
    added = [HANDLER]
    if "--use-distributed-optimizer" in argv:
        added += ["--dist-ckpt-optim-fully-reshardable"]
    if job.emergency_every and not any(each.startswith("--non-persistent-") for each in argv):
        added += ["--non-persistent-save-interval", str(job.emergency_every), "--non-persistent-ckpt-type", "global"]
    return added


def _choose(family: ModelFamily, argv: Sequence[str], job: Job, timeout_s: float) -> ElasticLayout:
    saved = early_flags(argv, EarlyFlags).save
    _lock(saved, timeout_s)
    delete_unfinished(_emergency_folder(argv, Path(saved)))
    ranks = int(os.environ["WORLD_SIZE"])
    with _one_rank(argv):
        base, space, costs, batches = _choices(family, job)
    try:
        return choose_for_megatron(base, msgspec.structs.replace(space, devices=ranks), job.most_ranks, costs, batches)
    except InfeasibleError as error:
        raise ConfigError(error.message, hint=error.hint) from error


def _choices(family: ModelFamily, job: Job) -> tuple[PlannerSettings, Space, CostModel, list[GlobalBatch]]:
    """What there is to choose from, by which costs, for which batches: from the command line of one rank."""
    from megatron_dynapipe.integration.flags import command_line
    from megatron_dynapipe.service.loop import split_sampler

    args, run = command_line.parse(family, sys.argv[1:])
    inputs = run.inputs
    sampler = split_sampler(run.data, inputs.splits[0])
    space = Space(
        devices=1,
        tensor_sizes=_tensor_sizes(args, job.most_ranks),
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

    before, world = sys.argv[1:], os.environ["WORLD_SIZE"]
    os.environ["WORLD_SIZE"] = "1"
    sys.argv[1:] = [each for each in argv if each != HANDLER]
    try:
        yield
    finally:
        unset_global_variables()
        sys.argv[1:], os.environ["WORLD_SIZE"] = before, world
