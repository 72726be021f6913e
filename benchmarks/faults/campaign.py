"""Random faults, one after another and at once, for as long as told: what becomes of training.

    python -m benchmarks.faults.campaign [--data DATASET] [--minutes 30] [--seed 0] [--iterations 100]

Run after run of a tiny model is started, on a shared server behind a relay (some beside a second job) or on a store of
its own, and disturbed by faults of `disturbances.py`, the next one some seconds and an iteration after the last. Most
runs are then left to their end; in some a last fault follows that is not put right. A run has to finish with the losses
of one that nobody disturbed, or to end with the last fault's error where it has one; nothing of it may be left. Prints
each run, and what was done how often with which outcome; exit status 1 if any run ends otherwise.
"""

import argparse
import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common import DEMO_DATA, markdown
from benchmarks.faults.disturbances import FAULTS, Scene, can_mount
from benchmarks.faults.runs import TOLERANCE, Run, losses, parting

SMALL = "--global-batch-size 4 --dynapipe-timeout-s 120 --lr-decay-iters 500"
"""The learning rate of an iteration is the same in longer and in shorter runs."""
PAUSE_S = (2.0, 7.0)
LAST_PROBABILITY = 0.4
OTHER_PROBABILITY = 0.3
CALM_ITERATIONS = 20
"""At the end of a run nothing is disturbed, so that the last faults can still do harm; no run ends before it."""
END_S, LEFT_S = 900.0, 60.0
WHAT = {name: " ".join((fault.act.__doc__ or "").split()) for name, fault in FAULTS.items()}
"""What is done, by the fault's name."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run of the campaign ended; `trouble` is empty where it should have ended so."""

    is_error: bool
    said: str
    seconds: float
    losses: float | None
    trouble: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), default=DEMO_DATA)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of faults and pauses; the moments are the machine's")
    parser.add_argument("--iterations", type=int, default=100, help=f"of each run, at least {2 * CALM_ITERATIONS}")
    options = parser.parse_args()
    if options.iterations < 2 * CALM_ITERATIONS:
        parser.error(f"expected --iterations of at least {2 * CALM_ITERATIONS}, got {options.iterations}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data
        flags = f"{SMALL} --train-iters {options.iterations} --dynapipe-lookahead {Scene.ahead}"
        expected = undisturbed(Path(folder) / "undisturbed", data, flags)
        print(markdown(["run", "store", "faults", "ended", "seconds", "losses"], []), flush=True)
        outcomes: dict[str, Counter[str]] = {name: Counter() for name in WHAT}
        number = failed = 0
        while time.monotonic() < (until := began + options.minutes * 60):
            choose, place = random.Random(f"{options.seed}/{number}"), Path(folder) / str(number)
            with make_scene(place, data, choose, flags, shared=not number % 2) as scene:
                ended = play(scene, options.iterations, expected, until)
                report(number, store_of(scene), scene.counts, ended, outcomes)
                if ended.trouble:
                    print(scene.run.log.read_text()[-3000:], file=sys.stderr)
            failed += bool(ended.trouble)
            number += 1
    print(f"\n{number} runs in {(time.monotonic() - began) / 60:.0f} minutes, {failed} ended as they should not\n")
    print_outcomes(outcomes)
    return 1 if failed else 0


def undisturbed(folder: Path, data: Path, flags: str) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    began = time.monotonic()
    run = Run(folder, data, flags)
    _, trouble = run.end(status=0, within_s=END_S)
    if trouble:
        raise SystemExit(f"{trouble} of the undisturbed run:\n{run.log.read_text()[-3000:]}")
    print(f"undisturbed: {max(losses(run.log))} iterations in {time.monotonic() - began:.0f} s\n")
    return losses(run.log)


def make_scene(folder: Path, data: Path, choose: random.Random, flags: str, *, shared: bool) -> Scene:
    """On a shared store or on one of its own, with a disk to fill where this user may mount one."""
    folder.mkdir()
    has = {"run", "shared" if shared else "own"}
    if can_mount(folder):
        has.add("disk")
    if shared and choose.random() < OTHER_PROBABILITY:
        has.add("other")
    return Scene(folder=folder, data=data, choose=choose, has=has, flags=flags)


def play(scene: Scene, iterations: int, expected: dict[int, float], until: float) -> Ended:
    """Disturb one run until it is near its end, or the time is over; then let it end."""
    run, choose = scene.run, scene.choose
    run.at(2, within_s=END_S)
    began = time.monotonic()
    ends_badly = choose.random() < LAST_PROBABILITY
    stop = choose.randint(CALM_ITERATIONS, iterations - CALM_ITERATIONS) if ends_badly else iterations - CALM_ITERATIONS
    family = [psutil.Process(run.process.pid), *run.children("")]
    while run.process.poll() is None and max(losses(run.log)) < stop and time.monotonic() < until:
        scene.disturb(choose.choice(scene.possible(last=False)))
        reached = max(losses(run.log))
        time.sleep(choose.uniform(*PAUSE_S))
        await_iteration(run, reached + 1)
        family += [process for process in run.children("") if process not in family]
    if ends_badly and run.process.poll() is None:
        scene.calm()
        time.sleep(5)
        scene.disturb(choose.choice(scene.possible(last=True)))
    last = None if outlived(run, iterations) else last_of(scene)
    status, trouble = run.end(status=0 if last is None else 1, within_s=END_S)
    said, logged = FAULTS[last].said if last else finished(scene, iterations), losses(run.log)
    assert said is not None
    found = re.search(said, run.log.read_text())
    if last is None and max(logged) != iterations:
        trouble = trouble or f"expected {iterations} iterations, got {max(logged)}"
    distance = parting(logged, expected)
    if distance is not None and distance > TOLERANCE:
        trouble = trouble or f"its losses part by {distance:.0e}"
    if found is None:
        trouble = trouble or f"expected {said!r} in its output, got exit status {status}"
    scene.calm()
    _, left = psutil.wait_procs(family, timeout=LEFT_S)
    if left:
        trouble = trouble or f"{len(left)} processes are left"
    return Ended(
        is_error=last is not None,
        said=found[0] if found else "",
        seconds=time.monotonic() - began,
        losses=distance,
        trouble=trouble,
    )


def outlived(run: Run, iterations: int) -> bool:
    """Whether the run has finished: all plans that it needed were there before the last fault."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(END_S)
    return run.process.returncode == 0 and max(losses(run.log)) == iterations


def await_iteration(run: Run, iteration: int) -> None:
    """So that a slow machine has as much time between two faults as a fast one; what never goes on is a finding."""
    deadline = time.monotonic() + END_S
    while run.process.poll() is None and max(losses(run.log)) < iteration and time.monotonic() < deadline:
        time.sleep(0.1)


def finished(scene: Scene, iterations: int) -> str:
    """What a run says at its end: of records that a full disk has left incomplete, no figures."""
    said = rf"{iterations} iterations, [\d,]+ tokens per second"
    return rf"{said}|warning: rank \d cannot record an iteration[^\n]*" if scene.counts["disk-full"] else said


def last_of(scene: Scene) -> str | None:
    """The last fault that ends a run, if one has come about."""
    return next((name for name, fault in FAULTS.items() if fault.said is not None and scene.counts[name]), None)


def store_of(scene: Scene) -> str:
    return "own" if "own" in scene.has else "shared, beside another job" if "other" in scene.has else "shared"


def report(number: int, store: str, counts: Counter[str], ended: Ended, outcomes: dict[str, Counter[str]]) -> None:
    """One line, and the sums."""
    faults = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in counts.items())
    said = f"**{ended.trouble}** {ended.said}" if ended.trouble else ended.said
    said = " ".join(said.split()).replace("|", "/")[:160]
    distance = "–" if ended.losses is None else f"within {ended.losses:.0e}"
    print(f"| {number} | {store} | {faults} | {said} | {ended.seconds:.0f} | {distance} |", flush=True)
    if ended.trouble:
        outcome = "otherwise"
    else:
        outcome = "right error" if ended.is_error else "equal losses"
    for name, count in counts.items():
        outcomes[name][outcome] += count


def print_outcomes(outcomes: dict[str, Counter[str]]) -> None:
    ends = ("in runs that finished with equal losses", "that ended with the right error")
    print(markdown(["fault", "what is done", "times", *ends], []))
    for name, counts in outcomes.items():
        good = f"{counts['equal losses']} | {counts['right error']}"
        bad = f" **otherwise: {counts['otherwise']}**" if counts["otherwise"] else ""
        print(f"| {name} | {WHAT[name]} | {sum(counts.values())} | {good}{bad} |")


if __name__ == "__main__":
    sys.exit(main())
