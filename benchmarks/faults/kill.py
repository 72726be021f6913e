"""Kill -9 of a random rank at a random moment, resume from the last checkpoint, again and again: does the curve join?

    python benchmarks/faults/kill.py --data .demo/data [--repetitions 20] [--family t5]

A run that nobody disturbs gives the losses. A second one loses a rank, is resumed from its last checkpoint, loses
another, and so on; after the last kill it is let to its end. Every line that it has logged must have the undisturbed
run's loss, each resume must go on right after the last complete checkpoint, and nothing of DynaPipe in a killed run
(the other rank, planner, store) may stay behind. Exit status 1 if any of this fails.

A rank that has saved a checkpoint leaves a queue server of Megatron's writer (`multiprocessing.Manager`) behind when it
is killed; it is counted apart and ended here.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+)")
SMALL = {
    "t5": "--encoder-num-layers 2 --decoder-num-layers 2",
    "gpt": "--num-layers 4",
}
COMMON = "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --global-batch-size 16 --eval-iters 0"
SAVE_INTERVAL = 3
MOST_ITERATIONS = 6
"""A run is killed before it has trained more than this since its start; the first is left to its first checkpoint."""
TOLERANCE = 1e-5
"""Of a loss, relative: lines have seven digits, and a plan that measured times have changed rounds otherwise."""
STOP_S = 60
"""What is left of a run must end within this after a kill."""


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


def command(options: argparse.Namespace, folder: Path, extra: str = "") -> list[str]:
    words = f"{SMALL[options.family]} {COMMON} --train-iters {iterations(options)} {extra}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        str(ROOT / f"pretrain_{options.family}_multitask.py"),
        *("--dynapipe-config", str(ROOT / "configs" / f"demo_{options.family}.yaml")),
        *("--dynapipe-data", str(options.data), "--dynapipe-report-dir", str(folder / "report")),
        *words.split(),
    ]


def iterations(options: argparse.Namespace) -> int:
    """Enough for every kill to come before the end, whatever the draws, and a few to join at the end."""
    return int(options.repetitions * (MOST_ITERATIONS + 2) + SAVE_INTERVAL)


def start(words: list[str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


def lines(log: Path) -> list[tuple[int, float]]:
    """What a run has logged so far: iterations and losses."""
    return [(int(number), float(loss)) for number, loss in LINE.findall(log.read_text())]


def last_checkpoint(saved: Path) -> int:
    """The iteration of the last complete one; 0 before the first."""
    tracker = saved / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def run(words: list[str], log: Path) -> None:
    if status := start(words, log).wait(timeout=1200):
        raise SystemExit(f"expected a run to end by itself, got status {status}:\n{log.read_text()[-3000:]}")


def lose_a_rank(words: list[str], log: Path, saved: Path, draw: random.Random) -> Loss:
    """Start a run and kill a random rank at a random moment of one of its first iterations.

    That moment may be one of a pass, a transfer, an optimizer step, or while a checkpoint is being saved.
    """
    process = start(words, log)
    first = 0 if last_checkpoint(saved) else SAVE_INTERVAL
    wait_for_lines(process, log, draw.randint(max(1, first), MOST_ITERATIONS))
    while not last_checkpoint(saved):
        time.sleep(0.03)
    began = time.monotonic()
    wait_for_lines(process, log, len(lines(log)) + 1)
    time.sleep(draw.random() * (time.monotonic() - began))
    family = psutil.Process(process.pid).children(recursive=True)
    ours = [p for p in family if not is_checkpoint_writer(p)]
    ranks = [p for p in psutil.Process(process.pid).children() if "multitask.py" in " ".join(p.cmdline())]
    victim = draw.randrange(len(ranks))
    ranks[victim].kill()
    killed, (after, _) = time.monotonic(), lines(log)[-1]
    process.wait(timeout=STOP_S)
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


def wait_for_lines(process: subprocess.Popen, log: Path, number: int) -> None:
    deadline = time.monotonic() + 300
    while len(lines(log)) < number:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"expected {number} iterations within 300 s, got:\n{log.read_text()[-3000:]}")
        time.sleep(0.03)


def losses(log: Path) -> dict[int, float]:
    """Each iteration's loss. The second line after a start is Megatron's mean of the first two iterations."""
    (first, one), (second, mean), *rest = lines(log)
    return {first: one, second: 2 * mean - one, **dict(rest)}


def parting(log: Path, expected: Mapping[int, float]) -> tuple[int, float]:
    """How many lines a run has logged, and the largest relative distance of one from the undisturbed run's loss."""
    distances = []
    for place, (iteration, loss) in enumerate(lines(log)):
        wanted = expected[iteration]
        if place == 1:  # a mean of two iterations
            wanted = (expected[iteration - 1] + wanted) / 2
        distances.append(abs(loss / wanted - 1))
    return len(distances), max(distances)


def judge(log: Path, expected: Mapping[int, float], resumed_from: int) -> tuple[str, bool]:
    """In words, whether a run has gone on from its checkpoint as the undisturbed one did."""
    count, distance = parting(log, expected)
    goes_on = lines(log)[0][0] == resumed_from + 1
    joins = goes_on and distance <= TOLERANCE
    return f"{count} losses, within {distance:.0e}{'' if joins else ': PART'}", joins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--family", choices=sorted(SMALL), default="t5")
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
    began = time.monotonic()
    run(command(options, folder), folder / "whole.log")
    print(f"undisturbed: {iterations(options)} iterations in {time.monotonic() - began:.0f} s", flush=True)
    expected = losses(folder / "whole.log")
    print("| kill | rank | after iteration | stopped within | left | left by writers | resumed from | then logged |")
    print("|---|---|---|---|---|---|---|---|")
    saved, draw = folder / "saved", random.Random(options.seed)
    words = command(options, folder, f"--save {saved} --save-interval {SAVE_INTERVAL} --load {saved}")
    good, lost = 0, None
    for number in range(options.repetitions + 1):
        log, following = folder / f"{number}.log", None
        if number < options.repetitions:
            following = lose_a_rank(words, log, saved, draw)
        else:
            run(words, log)
        said, joins = judge(log, expected, 0 if lost is None else lost.saved)
        if lost is not None:
            row = (number, lost.rank, lost.after, f"{lost.stop_s:.1f} s", lost.left, lost.writers, lost.saved, said)
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            good += joins and not lost.left
        elif not joins:
            raise SystemExit(f"expected a run without a kill to have the undisturbed run's losses, got {said}")
        lost = following
    return good


if __name__ == "__main__":
    sys.exit(main())
