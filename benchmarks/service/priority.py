"""What a planner costs training where they share cores: without one, with one of training's priority, with a nice one.

    python benchmarks/service/priority.py [--rounds 40] [--seconds 1.5] [--trainers CORES]

As many processes as there are cores play training: each multiplies matrices on one thread, and all wait for the slowest
after each step, as ranks do. Two planners plan without pause when it is their turn, and are stopped otherwise:

    round 0   none | as nice | nice 10        round 1   as nice | nice 10 | none        round 2   nice 10 | …

Machines drift, so a case's steps are compared with those of the same round without a planner. Prints, per case, the
median step, the median over rounds of the slowdown with its 95% interval (bootstrap), and the iterations planned.
`--more` adds what planners could have instead: nice 19, and Linux's SCHED_IDLE.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from unittest.mock import patch

import numpy as np
from jobs import service_settings, write_lengths

from megatron_dynapipe.service import ServiceSettings, process
from megatron_dynapipe.store import PlanStore, StoreServer, open_store

ALONE, AS_IT_IS = "without a planner", "nice 10"
SIZE, MULTIPLICATIONS = 192, 40
LOOK_AHEAD = 500
"""More iterations than a planner plans in a turn."""
PLANNER = "import os, sys, megatron_dynapipe.service.__main__ as planner; {change}; sys.exit(planner.main())"
CHANGES = {"as nice as training": "planner._NICE = 0", AS_IT_IS: "pass"}
MORE = {"nice 19": "planner._NICE = 19", "SCHED_IDLE": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"}


type Step = tuple[float, float]  # its end (time.monotonic) and what it took, in seconds


def train(start: Barrier, barrier: Barrier, seconds: float, results: "multiprocessing.Queue[list[Step]]") -> None:
    """One rank: steps for so long, counted from the moment when all have started."""
    matrix, steps = np.full((SIZE, SIZE), 1 / SIZE), []
    start.wait(300)
    end = time.monotonic() + seconds
    with suppress(BrokenBarrierError):  # another one has come to the end
        while (began := time.monotonic()) < end:
            for _ in range(MULTIPLICATIONS):
                matrix = matrix @ matrix
            barrier.wait(300)
            steps.append((time.monotonic(), time.monotonic() - began))
    barrier.abort()
    results.put(steps)


class Turns:
    """Planners that plan in their turn alone."""

    def __init__(self, stack: ExitStack, folder: Path, changes: Mapping[str, str]) -> None:
        self._planners = {case: self._start(stack, folder / f"{case}.log", change) for case, change in changes.items()}
        self.cases = ALONE, *changes

    def _start(self, stack: ExitStack, log: Path, change: str) -> "Turn":
        server = stack.enter_context(StoreServer())
        settings = service_settings(
            server.address, log.parent, layout=(4, 1, 4), layers=16, hidden=1024, samples=256, longest=1024,
            look_ahead=LOOK_AHEAD,
        )  # fmt: skip
        with ExitStack() as only_here:
            command = sys.executable, "-P", "-c", PLANNER.format(change=change)
            only_here.enter_context(patch.object(process, "_COMMAND", command))
            planner = stack.enter_context(process.PlannerProcess(settings, log_path=log))
        store = stack.enter_context(open_store(server.address, retention_s=None))
        store.wait_progress({settings.keys.done("train", 1): 0}, timeout_s=300, what="the first plans")
        os.kill(planner.pid, signal.SIGSTOP)
        stack.callback(lambda: os.kill(planner.pid, signal.SIGCONT))
        return Turn(planner.pid, store, settings)

    def give(self, case: str, until: float) -> None:
        """Let the case's planner plan until then."""
        turn = self._planners.get(case)
        if turn is not None:
            turn.store.announce(turn.settings.keys.progress("train"), turn.planned())  # its window is empty
            os.kill(turn.pid, signal.SIGCONT)
        time.sleep(max(until - time.monotonic(), 0))
        if turn is not None:
            os.kill(turn.pid, signal.SIGSTOP)

    def planned(self, case: str) -> int:
        """Iterations of a case's planner."""
        return self._planners[case].planned() if case in self._planners else 0


@dataclass
class Turn:
    """A planner and the iterations that it has planned."""

    pid: int
    store: PlanStore
    settings: ServiceSettings
    count: int = 0

    def planned(self) -> int:
        """How many iterations there are plans of, or were."""
        ahead = [self.settings.keys.done("train", self.count + number) for number in range(LOOK_AHEAD + 1)]
        self.count += len(self.store.read_progress(ahead))
        return self.count


def measure(
    options: argparse.Namespace, folder: Path, changes: Mapping[str, str]
) -> tuple[list[dict[str, list[float]]], dict[str, int]]:
    """Steps in ms by case of every round, and the iterations that were planned."""
    context = multiprocessing.get_context("spawn")
    start, barrier = context.Barrier(options.trainers + 1), context.Barrier(options.trainers)
    results = context.Queue()
    whole = options.rounds * (1 + len(changes)) * options.seconds
    trainers = [context.Process(target=train, args=(start, barrier, whole, results)) for _ in range(options.trainers)]
    with ExitStack() as stack:
        turns = Turns(stack, folder, changes)
        for each in trainers:
            each.start()
            stack.callback(each.kill)
        turns_of_rounds = follow(start, turns, options)
        steps = results.get(timeout=300)
        planned = {case: turns.planned(case) for case in turns.cases}
    return [
        {
            case: [took * 1e3 for at, took in steps if began <= at - took and at <= end]
            for case, (began, end) in spans.items()
        }
        for spans in turns_of_rounds
    ], planned


def follow(start: Barrier, turns: Turns, options: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    """Give all turns while the trainers train; when each began and ended, by round."""
    start.wait(300)
    started = time.monotonic()
    found = []
    for number in range(options.rounds):
        shift = number % len(turns.cases)
        spans = {}
        for place, case in enumerate((*turns.cases[shift:], *turns.cases[:shift])):
            end = started + (number * len(turns.cases) + place + 1) * options.seconds
            began = time.monotonic()
            turns.give(case, end)
            spans[case] = began, end
        found.append(spans)
    return found


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median of some ratios between the bounds of its 95% interval, by bootstrap."""
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), statistics.median(ratios), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn (%(default)s)")
    parser.add_argument("--trainers", type=int, default=os.cpu_count())
    parser.add_argument("--more", action="store_true", help="also other priorities than those of planners")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of the trainers, which start afresh
    with tempfile.TemporaryDirectory() as folder:
        write_lengths(Path(folder), samples=20_000, mean=256, longest=1024)
        rounds, planned = measure(options, Path(folder), CHANGES | (MORE if options.more else {}))
    full = [each for each in rounds if all(each.values())]
    print("| planner | step, median | slowdown, median of rounds (95%) | iterations planned |\n|---|---|---|---|")
    for case in planned:
        middle = statistics.median(step for each in full for step in each[case])
        low, ratio, high = interval([statistics.mean(each[case]) / statistics.mean(each[ALONE]) for each in full])
        print(f"| {case} | {middle:.1f} ms | {ratio:.3f} ({low:.3f}–{high:.3f}) | {planned[case]} |")
    print(f"\n{options.trainers} processes train, {len(full)} rounds; load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
