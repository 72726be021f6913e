"""`--dynapipe-elastic`: the layout for as many ranks as there are, resuming, leaving on notice.

    all ranks     parse the flags, once
    rank 0        checks a copy of them as for one rank, and chooses the layout for all
    all ranks     go on in the layout, from the last checkpoint

torchrun starts all ranks anew when one is lost, when a node comes, or when they leave on notice: SIGTERM, which its
agents send to their ranks. Megatron's `--exit-signal-handler` tells all ranks of it after an iteration, has the
checkpoint saved and ends the run; ranks then end with a status that is no success, or torchrun would end the job.
"""

import argparse
import contextlib
import copy
import functools
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from megatron_dynapipe.config import early_flags
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.pattern import without_stages
from megatron_dynapipe.megatron.entry import failure
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER, checkpoint_of, last_iteration
from megatron_dynapipe.megatron.flags.planning_flags import EQUAL
from megatron_dynapipe.outputs import LOCK_SHARE, lock_folder, replace_bytes, say, unwritten
from megatron_dynapipe.processes import end_with_launcher, package_path, run_guarded
from megatron_dynapipe.runtime.start_store import from_rank_0, may_start_again, renew
from megatron_dynapipe.service.settings import MeasuredCosts, PlanInputs

ELASTIC = "--dynapipe-elastic"
LAYOUT: Mapping[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "dynapipe_layers_per_stage": EQUAL,
    **dict.fromkeys(("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
    "pipeline_model_parallel_layout": None,
}
"""Arguments that are chosen here, with their defaults; what the user gives of them has no effect."""
SAVING = ".dynapipe-saving"
"""In the folder of emergency checkpoints: the iteration whose checkpoint this job began to save last."""
SAVE_EVERY = 50
"""Iterations between two emergency checkpoints, by default."""
BATCHES = 2
"""Global batches by which layouts are judged."""
LEFT = 75
"""Exit status of a rank that saved a checkpoint and left on notice: torchrun starts the ranks of other nodes anew."""


class ElasticLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of all ranks, as `megatron-dynapipe tune --json` tells it; without `predicted_ms` there is none."""

    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    layers_per_stage: tuple[int | float, ...] | None
    predicted_ms: float | None
    error: str | None


_has_notice = False
"""Whether some rank has had a notice; the same on all ranks, after the iteration in which they agreed on it."""


def adapting(main: Callable[[], None]) -> Callable[[], None]:
    """`main` of an entry script, made ready for starts after the first, as torchrun's `--max-restarts` allows them.

    With `--dynapipe-elastic` it is made ready for `fit_layout` and for notices, too.
    """

    def run() -> None:
        is_elastic = ELASTIC in sys.argv[1:]
        if is_elastic:
            end_with_launcher(signal.SIGKILL)  # SIGTERM would be a notice, and the rank would go on to save
            _take_notices()
        if is_elastic or may_start_again():
            renew(early_flags(sys.argv[1:]).dynapipe_timeout_s)
        if not is_elastic:
            return main()
        with status():
            main()
        return None

    return run


def fit_layout(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> None:
    """Give parsed flags the layout that fits the ranks that are there; changes nothing without `--dynapipe-elastic`.

    Raises:
        ConfigError: no layout fits, or a flag that elastic runs need is missing.
    """
    if not args.dynapipe_elastic:
        if may_start_again() and not (args.save and args.load == args.save):
            folder = args.save or "FOLDER"
            first = f" --pretrained-checkpoint {args.load}" if args.load else ""
            say(f"a start after a failure begins anew; --save {folder} --load {folder}{first} has it go on")
        return
    make_resumable(args)
    if args.hybrid_layer_pattern is not None:
        args.hybrid_layer_pattern = without_stages(args.hybrid_layer_pattern)
    layout = agreed_layout(lambda ranks: _choose(args, family, known, ranks), timeout_s=args.dynapipe_timeout_s)
    args.tensor_model_parallel_size = layout.tensor_parallel
    args.pipeline_model_parallel_size = layout.pipeline_parallel
    if layout.pipeline_parallel > 1:
        args.dynapipe_layers_per_stage = layout.layers_per_stage


def agreed_layout(choose: Callable[[int], ElasticLayout], *, timeout_s: float) -> ElasticLayout:
    """The layout of all ranks that are there, chosen by rank 0.

    Raises:
        ConfigError: on every rank: no layout fits.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    def make() -> str:
        began = time.monotonic()
        layout = choose(ranks)
        if layout.predicted_ms is None:
            raise ConfigError(
                f"no layout of {ranks} ranks fits: {layout.error}",
                hint="`megatron-dynapipe tune` shows what is wrong with each; torchrun --nnodes MIN:MAX says how many"
                " nodes a start waits for",
            )
        seconds = time.monotonic() - began
        print(f"layout: {ranks} ranks: {_description(layout)}; chosen in {seconds:.1f} s", flush=True)
        return msgspec.json.encode(layout).decode()

    return msgspec.json.decode(from_rank_0("layout", make, timeout_s=timeout_s), type=ElasticLayout)


@contextlib.contextmanager
def status() -> Iterator[None]:
    """Around a run: a rank that leaves on notice ends with a status by which torchrun starts it anew where it stays."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or not _has_notice:
            raise
        _leave()


def _description(layout: ElasticLayout) -> str:
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

    def signals_received(handler: DistributedSignalHandler) -> object:
        global _has_notice
        notices = received(handler)
        _has_notice = _has_notice or any(notices)
        note_save(get_args())
        return notices

    DistributedSignalHandler.signals_received = signals_received
    results_queue = filesystem_async.get_write_results_queue

    @functools.wraps(results_queue)  # start-up looks at its parameters
    def get_write_results_queue(*arguments: object, **keywords: object) -> Any:
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
    every = args.non_persistent_save_interval
    lasting = args.save_interval
    if args.rank != 0 or args.non_persistent_ckpt_type != "global" or not every or iteration % every:
        return
    if not (lasting and iteration % lasting == 0):
        folder = _emergency_folder(args)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(folder / SAVING, f"{iteration}\n".encode())
        except OSError as error:
            raise unwritten(folder, error) from error


def delete_unfinished(folder: Path) -> None:
    """Delete the emergency checkpoint that this job began and did not complete; no rank may be saving.

    Megatron keeps the one of the highest iteration, complete or not, and deletes the others before it saves again.

    Args:
        folder: the folder of emergency checkpoints. If its tracker cannot be read, nothing is deleted.
    """
    begun = last_iteration(folder, SAVING)
    complete = last_iteration(folder)
    path = checkpoint_of(folder, begun)
    if begun is None or complete is None or begun <= complete or path is None or path.is_symlink():
        return
    shutil.rmtree(path, ignore_errors=True)


def make_resumable(args: argparse.Namespace) -> None:
    """Take the layout out of parsed flags, and have checkpoints saved and resumed that load in every layout.

    Raises:
        ConfigError: there is no folder for checkpoints, they would be of a kind that has one layout, or --finetune
            would begin anew from this job's.
    """
    dropped = [f"--{name.replace('_', '-')}" for name, default in LAYOUT.items() if getattr(args, name) != default]
    if dropped:
        say(f"without effect with {ELASTIC}, which chooses the layout: {', '.join(dropped)}")
    vars(args).update(LAYOUT)
    if not args.save:
        raise ConfigError(f"expected --save DIR with {ELASTIC}, got none", hint="a folder that all nodes see")
    if not args.save_interval:
        raise ConfigError("expected --save-interval N with --save, got none", hint="iterations between checkpoints")
    if (kind := args.ckpt_format) != "torch_dist":
        raise ConfigError(
            f"expected --ckpt-format torch_dist with {ELASTIC}, got {kind}", hint="others load in one layout alone"
        )
    if args.context_parallel_size > 1:
        raise ConfigError(f"{ELASTIC} knows no layouts with context parallelism", hint="remove --context-parallel-size")
    if any((folder / TRACKER).exists() for folder in (Path(args.save), _emergency_folder(args))):
        if args.finetune:
            raise ConfigError(
                f"{args.save} holds checkpoints of this job, and --finetune would begin from them anew",
                hint="leave --finetune out when a job is resumed, or --save in an empty folder",
            )
        args.load = args.save  # whatever the job first began from
    args.exit_signal_handler = True
    args.dist_ckpt_optim_fully_reshardable |= args.use_distributed_optimizer
    if args.non_persistent_save_interval is None and args.non_persistent_ckpt_type is None:
        args.non_persistent_save_interval = SAVE_EVERY
        args.non_persistent_ckpt_type = "global"


def _emergency_folder(args: argparse.Namespace) -> Path:
    return Path(args.non_persistent_global_ckpt_dir or Path(args.save, "non_persistent"))


def _choose(
    args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action], ranks: int
) -> ElasticLayout:
    """The fastest layout of so many ranks, by the costs and the first batches of a run of one rank."""
    from megatron_dynapipe.megatron.flags import command_line

    lock_folder(Path(args.save), wait_s=args.dynapipe_timeout_s * LOCK_SHARE)
    delete_unfinished(_emergency_folder(args))
    one = copy.deepcopy(args)
    with _one_rank(), contextlib.redirect_stdout(io.StringIO()):  # a thousand lines of arguments
        command_line.settle(one, family, known)
        command_line.check_by_megatron(one)
        run = command_line.configured(one, family)
    space = {
        "devices": ranks,
        "tensor_sizes": _tensor_sizes(one, ranks),
        "distributed_optimizer": run.planner.distributed_optimizer,
        "global_batch_size": None if one.tokens_per_global_batch else one.global_batch_size,
    }
    return tuned(run.inputs, space, deadline_s=args.dynapipe_timeout_s)


def tuned(inputs: PlanInputs, space: Mapping[str, object], *, deadline_s: float) -> ElasticLayout:
    """The fastest layout of a run's own plans, by `megatron-dynapipe tune` in a process of its own.

    Args:
        inputs: the run's, on one rank.
        space: fields of `tools.tuning.Space`.
        deadline_s: the process's deadline.

    Raises:
        ConfigError: `tune` refused, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        path.write_bytes(msgspec.json.encode([inputs, space]))
        command = [sys.executable, "-P", "-m", "megatron_dynapipe", "tune", "--of-run", str(path), "--json"]
        command += ["--data", inputs.data_folder, "--limit", str(BATCHES), "--top", "1"]
        costs = inputs.costs.path if isinstance(inputs.costs, MeasuredCosts) else "analytic"
        command += ["--devices", str(space["devices"]), "--cost-model", costs]
        environment = os.environ | {"PYTHONPATH": package_path()}
        _, lines = run_guarded(command, deadline_s=deadline_s, env=environment)
    if found := [line for line in lines if line.startswith("{")]:
        layouts = msgspec.json.decode(found[-1], type=dict[str, msgspec.Raw])["layouts"]
        return msgspec.json.decode(layouts, type=tuple[ElasticLayout, ...])[0]
    said = {name: text for name, _, text in (line.partition(": ") for line in lines)}
    raise ConfigError(
        f"no layout of {space['devices']} ranks could be chosen: {said.get('error', f'not in {deadline_s:.0f} s')}",
        hint=said.get("hint"),
    )


def _tensor_sizes(args: argparse.Namespace, most: int) -> tuple[int, ...]:
    """Sizes that divide the model, and under which the vocabulary is padded to the same size."""
    sharded = (args.num_attention_heads, args.num_query_groups or args.num_attention_heads, args.ffn_hidden_size)
    return tuple(
        size
        for size in range(1, most + 1)
        if not any(number % size for number in sharded)
        and args.padded_vocab_size % (args.make_vocab_size_divisible_by * size) == 0
    )


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """The environment of a run of one rank, for the length of a block."""
    world = os.environ.get("WORLD_SIZE", "1")
    os.environ["WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = world
