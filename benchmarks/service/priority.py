"""What a planner costs training where they share cores: without one, with one of training's priority, with a nice one.

    python benchmarks/service/priority.py [--rounds 5] [--seconds 6] [--trainers CORES]

As many processes as there are cores play training: each multiplies matrices on one thread, and all wait for the slowest
after each step, as ranks do. Meanwhile a planner plans without pause. The three cases take turns. Prints, per case, the
median and the 95th percentile of a step, the slowdown of its mean, and the iterations planned.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from unittest.mock import patch

import numpy as np
from jobs import service_settings, write_lengths

from megatron_dynapipe.service import ServiceSettings, process
from megatron_dynapipe.service.figures import REPORT_S, decode_figures
from megatron_dynapipe.store import PlanStore, StoreServer, open_store

CASES = ("without a planner", "as nice as training", "nice 10")
SIZE, MULTIPLICATIONS = 192, 40
PLANNER = "import sys, megatron_dynapipe.service.__main__ as planner; planner._NICE = 0; sys.exit(planner.main())"


def train(barrier: Barrier, seconds: float, results: "multiprocessing.Queue[list[float]]") -> None:
    """One rank: steps for so long, counted from the moment when all have started; their times in ms."""
    matrix, times = np.full((SIZE, SIZE), 1 / SIZE), []
    barrier.wait(300)
    end = time.perf_counter() + seconds
    with suppress(BrokenBarrierError):  # another one has come to the end
        while (began := time.perf_counter()) < end:
            for _ in range(MULTIPLICATIONS):
                matrix = matrix @ matrix
            barrier.wait(300)
            times.append((time.perf_counter() - began) * 1e3)
    barrier.abort()
    results.put(times)


def steps(trainers: int, seconds: float) -> list[float]:
    """Times of the steps of one rank; they end together."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(trainers), context.Queue()
    processes = [context.Process(target=train, args=(barrier, seconds, results)) for _ in range(trainers)]
    for each in processes:
        each.start()
    found = [results.get(timeout=300 + seconds) for _ in processes]
    for each in processes:
        each.join(60)
    return found[0]


def measure(case: str, folder: Path, options: argparse.Namespace) -> tuple[list[float], int]:
    """Steps beside the planner of this case, and how many iterations it has planned meanwhile."""
    if case == CASES[0]:
        return steps(options.trainers, options.seconds), 0
    with ExitStack() as stack:
        server = stack.enter_context(StoreServer())
        settings = service_settings(
            server.address, folder, layout=(4, 1, 4), layers=16, hidden=1024, samples=256, longest=1024,
            look_ahead=1_000_000,
        )  # fmt: skip
        if case == CASES[1]:
            stack.enter_context(patch.object(process, "_COMMAND", (sys.executable, "-P", "-c", PLANNER)))
        stack.enter_context(process.PlannerProcess(settings, log_path=folder / "planner.log"))
        store = stack.enter_context(open_store(server.address, retention_s=None))
        store.wait_progress({settings.keys.done("train", 1): 0}, timeout_s=300, what="the first plans")
        before = report_of(store, settings)
        times = steps(options.trainers, options.seconds)
        time.sleep(2 * REPORT_S)
        return times, report_of(store, settings) - before


def report_of(store: PlanStore, settings: ServiceSettings) -> int:
    """Iterations that the planner has reported."""
    (data,) = store.read_latest([settings.keys.figures(0)])
    found = None if data is None else decode_figures(data)
    return 0 if found is None else found.planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--trainers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    times: dict[str, list[float]] = {case: [] for case in CASES}
    planned = dict.fromkeys(CASES, 0)
    with tempfile.TemporaryDirectory() as folder:
        write_lengths(Path(folder), samples=20_000, mean=256, longest=1024)
        for _ in range(options.rounds):
            for case in CASES:
                found, count = measure(case, Path(folder), options)
                times[case] += found
                planned[case] += count
    print("| planner | step, median | 95 % | slowdown of the mean | iterations planned |\n|---|---|---|---|---|")
    alone = statistics.mean(times[CASES[0]])
    for case, found in times.items():
        middle, most = statistics.median(found), statistics.quantiles(found, n=20)[-1]
        slower = statistics.mean(found) / alone
        print(f"| {case} | {middle:.1f} ms | {most:.1f} ms | {slower:.2f} | {planned[case]} |")
    print(f"\n{options.trainers} processes train; load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
