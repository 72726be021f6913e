"""`--dynapipe-elastic`: the layout for as many ranks as there are, resuming, leaving on notice.

    rank 0        parses the flags as for one rank, and chooses the layout for all
    all ranks     go on with the layout's flags, from the last checkpoint

torchrun starts all ranks anew when one is lost, when a node comes, or when they leave on notice: SIGTERM, which its
agents send to their ranks. Megatron's `--exit-signal-handler` tells all ranks of it after an iteration, has the
checkpoint saved and ends the run; ranks then end with a status that is no success, or torchrun would end the job.
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

from megatron_dynapipe import config
from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.elastic.layout import agreed_layout
from megatron_dynapipe.elastic.run import LEFT, SAVE_EVERY
from megatron_dynapipe.elastic.run_folder import LOCK_SHARE, lock_folder
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.integration.entry import failure
from megatron_dynapipe.outputs import replace_bytes, unwritten
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.runtime.start_store import renew
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning import Space, TunedLayout, tune
from megatron_dynapipe.units import ModelFamily

if TYPE_CHECKING:
    from megatron_dynapipe.integration.flags.run_config import RunConfig

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
    timeout_s = float(config.value_of(argv, "dynapipe-timeout-s", "300"))
    renew(timeout_s)
    layout = agreed_layout(
        lambda ranks: _choose(family, argv, ranks, timeout_s), timeout_s=timeout_s, describe=_description
    )
    sys.argv[1:] = argv + layout_flags(layout)


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
    """After every iteration, see what ranks agreed on."""
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
    saved = config.value_of(argv, "save", "")
    if not saved:
        raise ConfigError(f"expected --save DIR with {ELASTIC}, got none", hint="a folder that all nodes see")
    if not config.value_of(argv, "save-interval", ""):
        raise ConfigError("expected --save-interval N with --save, got none", hint="iterations between checkpoints")
    if (kind := config.value_of(argv, "ckpt-format", "torch_dist")) != "torch_dist":
        raise ConfigError(
            f"expected --ckpt-format torch_dist with {ELASTIC}, got {kind}", hint="others load in one layout alone"
        )
    if int(config.value_of(argv, "context-parallel-size", "1")) > 1:
        raise ConfigError(f"{ELASTIC} knows no layouts with context parallelism", hint="remove --context-parallel-size")
    return [*argv, *resuming(argv, Path(saved))]


def resuming(argv: Sequence[str], saved: Path) -> list[str]:
    """Flags that resume what this job has saved, whatever it first began from; none before it has."""
    from megatron_dynapipe.integration.flags.megatron_flags import TRACKER

    if not any((folder / TRACKER).exists() for folder in (saved, _emergency_folder(argv, saved))):
        return []
    if "--finetune" in argv:
        raise ConfigError(
            f"{saved} holds checkpoints of this job, and --finetune would begin from them anew",
            hint="leave --finetune out when a job is resumed, or --save in an empty folder",
        )
    return ["--load", str(saved)]


def _emergency_folder(argv: Sequence[str], saved: Path) -> Path:
    return Path(config.value_of(argv, "non-persistent-global-ckpt-dir", str(saved / "non_persistent")))


def _saving_flags(argv: Sequence[str]) -> list[str]:
    """Flags by which every checkpoint can be loaded in every layout, on notice and every few iterations."""
    added = [HANDLER]
    if "--use-distributed-optimizer" in argv:
        added += ["--dist-ckpt-optim-fully-reshardable"]
    if not any(argument.startswith("--non-persistent-") for argument in argv):
        added += ["--non-persistent-save-interval", str(SAVE_EVERY), "--non-persistent-ckpt-type", "global"]
    return added


def _choose(family: ModelFamily, argv: Sequence[str], ranks: int, timeout_s: float) -> TunedLayout:
    saved = config.value_of(argv, "save", "")
    _lock(saved, timeout_s)
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
    from megatron_dynapipe.integration.flags.plan_inputs import plan_inputs
    from megatron_dynapipe.service.loop import split_sampler

    args, run = command_line.parse(family, sys.argv[1:])
    inputs = plan_inputs(run)
    sampler = split_sampler(run.data, inputs.splits[0])
    space = Space(
        devices=ranks,
        tensor_sizes=_tensor_sizes(args, ranks),
        distributed_optimizer=run.parallel.distributed_optimizer,
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
