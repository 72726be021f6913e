"""Kill -9 of a random rank at a random moment, resume from the last checkpoint, again and again: does the curve join?

    python -m benchmarks.faults.kill [--data DATASET] [--repetitions 20] [--family t5]

A run that nobody disturbs gives the losses. A second one loses a rank, is resumed from its last checkpoint, loses
another, and so on; after the last kill it is let to its end. Every line that it has logged must have the undisturbed
run's loss, each resume must go on right after the last complete checkpoint, and nothing of DynaPipe in a killed run
(the other rank, planner, store) may stay behind. Exit status 1 if any of this fails.

A rank that has saved a checkpoint leaves a queue server of Megatron's writer (`multiprocessing.Manager`) behind when it
is killed; it is counted apart and ended here.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import DEMO_DATA
from benchmarks.faults.runs import LAYERS, START_S, TOLERANCE, Run, lines, losses

SAVE_INTERVAL = 3
MOST_ITERATIONS = 6
"""A run is killed before it has trained more than this since its start; the first is left to its first checkpoint."""
STOP_S = 60
"""What is left of a run must end within this after a kill."""
WHOLE_S = 1200


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A rank that was killed, and how the run went on.

    Attributes:
        rank: the one killed.
        after: the iteration logged last before.
        saved: that of the last complete checkpoint.
        stop_s: from the kill until everything else of the run had ended.
        left: of DynaPipe's processes, those that had not within `STOP_S`.
        writers: processes of Megatron's checkpoint writer that were left.
    """

    rank: int
    after: int
    saved: int
    stop_s: float
    left: int
    writers: int


def last_checkpoint(saved: Path) -> int:
    """The iteration of the last complete one; 0 before the first."""
    tracker = saved / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def lose_a_rank(run: Run, saved: Path, draw: random.Random) -> Loss:
    """Kill a random rank at a random moment of one of a run's first iterations.

    That moment may be one of a pass, a transfer, an optimizer step, or while a checkpoint is being saved.
    """
    first = 0 if last_checkpoint(saved) else SAVE_INTERVAL
    wait_for_lines(run, draw.randint(max(1, first), MOST_ITERATIONS))
    while not last_checkpoint(saved):
        time.sleep(0.03)
    began = time.monotonic()
    wait_for_lines(run, len(lines(run.log)) + 1)
    time.sleep(draw.random() * (time.monotonic() - began))
    launcher = psutil.Process(run.process.pid)
    family = launcher.children(recursive=True)
    ours = [p for p in family if not is_checkpoint_writer(p)]
    ranks = [p for p in launcher.children() if "multitask.py" in " ".join(p.cmdline())]
    victim = draw.randrange(len(ranks))
    ranks[victim].kill()
    killed, (after, _) = time.monotonic(), lines(run.log)[-1]
    run.process.wait(timeout=STOP_S)
    _, left = psutil.wait_procs(ours, timeout=STOP_S)
    stop_s = time.monotonic() - killed
    writers = [p for p in family if p not in ours and p.is_running()]
    for process_left in (*left, *writers):
        process_left.kill()
    return Loss(
        rank=victim, after=after, saved=last_checkpoint(saved), stop_s=stop_s, left=len(left), writers=len(writers)
    )


def is_checkpoint_writer(process: psutil.Process) -> bool:
    """Of Megatron: only it uses the start method "spawn", whose processes have these command lines."""
    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return "multiprocessing.spawn" in words or "multiprocessing.resource_tracker" in words


def wait_for_lines(run: Run, number: int) -> None:
    deadline = time.monotonic() + START_S
    while len(lines(run.log)) < number:
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"expected {number} iterations within {START_S} s, got:\n{run.log.read_text()[-3000:]}")
        time.sleep(0.03)


def judge(log: Path, expected: Mapping[int, float], resumed_from: int) -> tuple[str, bool]:
    """In words, whether a run has gone on from its checkpoint as the undisturbed one did."""
    found = losses(log)
    distance = max(abs(loss / expected[iteration] - 1) for iteration, loss in found.items())
    joins = min(found) == resumed_from + 1 and distance <= TOLERANCE
    return f"{len(found)} losses, within {distance:.0e}{'' if joins else ': PART'}", joins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), default=DEMO_DATA)
    parser.add_argument("--family", choices=sorted(LAYERS), default="t5")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the ranks and moments")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        good = repeat(options, Path(folder))
    print(f"{good} of {options.repetitions} resumed runs join; {(time.monotonic() - began) / 60:.1f} min in all")
    return 0 if good == options.repetitions else 1


def repeat(options: argparse.Namespace, folder: Path) -> int:
    """How many of the kills were survived as they should be; prints a row of the table for each."""
    began, saved, draw = time.monotonic(), folder / "saved", random.Random(options.seed)
    # Enough for every kill to come before the end, whatever the draws, and a few to join at the end.
    iterations = options.repetitions * (MOST_ITERATIONS + 2) + SAVE_INTERVAL

    def start(name: str, flags: str = "") -> Run:
        return Run(folder / name, options.data, f"--train-iters {iterations} {flags}", family=options.family)

    whole = start("whole")
    finish(whole)
    print(f"undisturbed: {iterations} iterations in {time.monotonic() - began:.0f} s", flush=True)
    expected = losses(whole.log)
    print("| kill | rank | after iteration | stopped within | left | left by writers | resumed from | then logged |")
    print("|---|---|---|---|---|---|---|---|")
    good, lost = 0, None
    for number in range(options.repetitions + 1):
        run = start(str(number), f"--save {saved} --save-interval {SAVE_INTERVAL} --load {saved}")
        following = lose_a_rank(run, saved, draw) if number < options.repetitions else finish(run)
        said, joins = judge(run.log, expected, 0 if lost is None else lost.saved)
        if lost is not None:
            row = (number, lost.rank, lost.after, f"{lost.stop_s:.1f} s", lost.left, lost.writers, lost.saved, said)
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            good += joins and not lost.left
        elif not joins:
            raise SystemExit(f"expected a run without a kill to have the undisturbed run's losses, got {said}")
        lost = following
    return good


def finish(run: Run) -> None:
    """Let a run end by itself."""
    _, trouble = run.end(status=0, within_s=WHOLE_S)
    if trouble:
        raise SystemExit(f"{trouble}:\n{run.log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
