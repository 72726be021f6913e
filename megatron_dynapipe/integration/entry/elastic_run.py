"""A rank under `megatron-dynapipe launch`: the layout for as many ranks as there are, resuming, leaving on notice.

    rank 0        parses the flags as for one rank, has the layout chosen, tells all ranks
    ranks of it   go on with the layout's flags
    others        stand by until the set of nodes changes, or the run ends

A notice is SIGTERM or SIGUSR1, to any rank: Megatron's `--exit-signal-handler` tells all ranks after an iteration, has
the checkpoint saved and ends the run; its ranks then end with the status by which agents know that they left.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from megatron_dynapipe import config
from megatron_dynapipe.elastic import rounds
from megatron_dynapipe.elastic.job import LEFT, Job, note
from megatron_dynapipe.elastic.pace import SAVE_EVERY
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.files import read_bounded, user_cache_folder
from megatron_dynapipe.integration.entry import emergency, failure, launch
from megatron_dynapipe.units import ModelFamily

if TYPE_CHECKING:
    from megatron_dynapipe.elastic.layout import Choice, Question

LAYOUT_FLAGS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
    *("--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout", "--dynapipe-layers-per-stage"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
)
"""Flags that take one value and are chosen here; what the user gives of them has no effect."""
HANDLER = "--exit-signal-handler"
BATCHES = 2
"""Global batches by which layouts are judged."""

_heard_notice = False
"""Whether some rank has had a notice; the same on all ranks, after the iteration in which they agreed on it."""


def prepare(family: ModelFamily) -> None:
    """Turn the command line into that of this number of ranks; nothing happens where `launch` did not start the rank.

    A rank that the layout has no use for does not return.

    Raises:
        ConfigError: no layout fits, or a flag that `launch` needs is missing.
    """
    job = Job.current()
    if job is None:
        return
    _listen()
    words = _words()
    if job.emergency_every is None and not _saves_itself(words):
        emergency.keep_pace()
    words += _saving(words, job)
    timeout_s = float(config.value_of(words, "dynapipe-timeout-s", "300"))

    def decide() -> str:
        return msgspec.json.encode(_choose(family, words, job)).decode()

    choice = _decoded(launch.from_rank_0("layout", decide, timeout_s=timeout_s))
    if not choice.ranks:
        rounds.await_more_ranks(choice, job)
    if int(os.environ["RANK"]) >= choice.ranks:
        rounds.stand_by(choice, timeout_s=timeout_s)
    os.environ["WORLD_SIZE"] = str(choice.ranks)
    sys.argv[1:] = words + choice.words()


@contextlib.contextmanager
def status() -> Iterator[None]:
    """Around a run: a rank that leaves on notice ends with the status that says so; standing ranks hear of the end."""
    try:
        yield
    except SystemExit as leaving:
        if leaving.code or not _heard_notice:
            raise
        note("saved")
        _leave()
    if Job.current() is not None and os.environ.get("RANK") == "0":
        rounds.tell_end()


def _leave() -> NoReturn:
    """End at once: taking down an interpreter with this many modules takes a second, for which all others wait."""
    for helper in multiprocessing.active_children():  # Megatron's checkpoint writer has one
        helper.terminate()
    failure.leave(LEFT)
    sys.exit(LEFT)


def _decoded(text: str) -> "Choice":
    from megatron_dynapipe.elastic.layout import Choice

    return msgspec.json.decode(text, type=Choice)


def _listen() -> None:
    """Take SIGUSR1 as SIGTERM, which Megatron's handler takes; remember what all ranks agree on."""
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    received = DistributedSignalHandler.signals_received

    def signals_received(handler: DistributedSignalHandler) -> Any:
        global _heard_notice
        heard = received(handler)
        if any(heard) and not _heard_notice:
            _heard_notice = True
            note("agreed")
        return heard

    DistributedSignalHandler.signals_received = signals_received
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def _words() -> list[str]:
    """The command line without a layout, with what makes it resume.

    Raises:
        ConfigError: there is no folder for checkpoints, or they would be of a kind that has one layout.
    """
    from megatron_dynapipe.integration.flags import command_line

    words = command_line.expanded(sys.argv[1:])
    if os.environ["RANK"] == "0" and (given := [word for word in words if word.partition("=")[0] in LAYOUT_FLAGS]):
        print(f"without effect under launch, which chooses the layout: {', '.join(given)}", flush=True)
    words = without(words, LAYOUT_FLAGS)
    saved = config.value_of(words, "save", "")
    if not saved:
        raise ConfigError("expected --save DIR under launch, got none", hint="a folder that all nodes see")
    if not config.value_of(words, "save-interval", ""):
        raise ConfigError("expected --save-interval N with --save, got none", hint="iterations between checkpoints")
    if (kind := config.value_of(words, "ckpt-format", "torch_dist")) != "torch_dist":
        raise ConfigError(
            f"expected --ckpt-format torch_dist under launch, got {kind}", hint="others load in one layout alone"
        )
    if int(config.value_of(words, "context-parallel-size", "1")) > 1:
        raise ConfigError("launch knows no layouts with context parallelism", hint="remove --context-parallel-size")
    return [*words, *resuming(words, Path(saved))]


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without flags that take one value."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word in flags:
            next(left, None)
        elif word.partition("=")[0] not in flags:
            kept.append(word)
    return kept


def resuming(words: Sequence[str], saved: Path) -> list[str]:
    """Flags that resume what this job has saved, whatever it first began from; none before it has."""
    from megatron_dynapipe.integration.flags.megatron_flags import TRACKER

    if not any((folder / TRACKER).exists() for folder in (saved, _emergency_folder(words, saved))):
        return []
    if "--finetune" in words:
        raise ConfigError(
            f"{saved} holds checkpoints of this job, and --finetune would begin from them anew",
            hint="leave --finetune out when a job is resumed, or --save in an empty folder",
        )
    return ["--load", str(saved)]


def _emergency_folder(words: Sequence[str], saved: Path) -> Path:
    return Path(config.value_of(words, "non-persistent-global-ckpt-dir", str(saved / "non_persistent")))


def remove_unfinished(folder: Path) -> None:
    """Remove emergency checkpoints that were not completed; no rank may be saving.

    Megatron keeps the one of the highest iteration, complete or not, and removes the others before it saves again.
    """
    from megatron_dynapipe.integration.flags.megatron_flags import TRACKER

    try:
        complete = int(read_bounded(folder / TRACKER, most_bytes=100))
    except (OSError, ValueError):
        complete = -1
    for path in folder.glob("iter_*"):
        number = path.name.removeprefix("iter_")
        if number.isdecimal() and int(number) > complete:
            shutil.rmtree(path, ignore_errors=True)


def _saves_itself(words: Sequence[str]) -> bool:
    return any(word.startswith("--non-persistent-") for word in words)


def _saving(words: Sequence[str], job: Job) -> list[str]:
    """Flags by which every checkpoint can be loaded in every layout, on notice and every few iterations."""
    added = [HANDLER]
    if "--use-distributed-optimizer" in words:
        added += ["--dist-ckpt-optim-fully-reshardable"]
    every = SAVE_EVERY if job.emergency_every is None else job.emergency_every
    if every and not _saves_itself(words):
        added += ["--non-persistent-save-interval", str(every), "--non-persistent-ckpt-type", "global"]
    return added


def _choose(family: ModelFamily, words: Sequence[str], job: Job) -> "Choice":
    from megatron_dynapipe.elastic.layout import cached

    began = time.monotonic()
    remove_unfinished(_emergency_folder(words, Path(config.value_of(words, "save", ""))))
    with _one_rank(words):
        question, costs, batches = _question(family, job)
    question = msgspec.structs.replace(question, ranks=int(os.environ["WORLD_SIZE"]))
    try:
        choice = cached(question, costs, batches, user_cache_folder())
    except InfeasibleError as error:
        raise ConfigError(error.message, hint=error.hint) from error
    seconds = time.monotonic() - began
    note("layout", ranks=choice.ranks, seconds=round(seconds, 3), layout=str(choice))
    if choice.ranks:
        left = f"; {question.ranks - choice.ranks} stand by ({choice.reason})" if choice.reason else ""
        print(f"layout: {choice.ranks} ranks: {choice}; chosen in {seconds:.1f} s{left}", flush=True)
    return choice


def _question(family: ModelFamily, job: Job) -> "tuple[Question, Any, list[Any]]":
    """What is to be chosen, by which costs, for which batches: from the command line of one rank."""
    from megatron_dynapipe.elastic.layout import Question
    from megatron_dynapipe.integration.flags import command_line
    from megatron_dynapipe.integration.flags.plan_inputs import plan_inputs
    from megatron_dynapipe.service.source import split_sampler

    args, run = command_line.parse(family, sys.argv[1:])
    inputs = plan_inputs(run)
    sampler = split_sampler(run.data, inputs.splits[0])
    question = Question(
        base=inputs.planner,
        ranks=1,
        most_ranks=job.most_ranks,
        tensor_sizes=_tensor_sizes(args, job.most_ranks),
        distributed_optimizer=run.parallel.distributed_optimizer,
        global_batch_size=None if args.tokens_per_global_batch else args.global_batch_size,
    )
    count = sampler.batches.count
    return question, inputs.costs.load(), [sampler.batch(at) for at in range(min(BATCHES, count or BATCHES))]


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
def _one_rank(words: Sequence[str]) -> Iterator[None]:
    """The command line and the environment of a run of one rank, for the length of a block.

    Parsing sets Megatron's global variables, a signal handler among them: there is to be none yet.
    """
    from megatron.training.global_vars import unset_global_variables

    argv, world = sys.argv[1:], os.environ["WORLD_SIZE"]
    os.environ["WORLD_SIZE"] = "1"
    sys.argv[1:] = [word for word in words if word != HANDLER]
    try:
        yield
    finally:
        unset_global_variables()
        sys.argv[1:], os.environ["WORLD_SIZE"] = argv, world
