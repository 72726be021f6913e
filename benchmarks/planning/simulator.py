"""Passes per second of the native simulator and list scheduler, on one core.

python benchmarks/planning/simulator.py
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from megatron_dynapipe.planning.native import core
from megatron_dynapipe.planning.problem import ScheduleProblem
from megatron_dynapipe.planning.schedules.one_f_one_b import default_depths, one_f_one_b

REPETITIONS = 200


def main() -> None:
    print(f"{'stages':>6} {'micro-batches':>13} {'passes':>6}   {'simulate':>24}   {'list schedule':>24}")
    for stages, micro_batches in ((4, 32), (8, 64), (16, 128)):
        problem = uneven(micro_batches, stages)
        passes = 2 * stages * micro_batches
        codes = [[2 * p.micro_batch + (type(p).__name__ == "Backward") for p in o] for o in one_f_one_b(problem)]
        order, costs, state = np.array(codes, np.int64), problem.cost_arrays, problem.model_state_bytes
        depths = np.array(default_depths(problem), np.int64)
        limit = problem.memory_limit_bytes
        simulated = seconds(lambda o=order, c=costs, s=state: core.simulate(c, 1, s, False, o, False))
        scheduled = seconds(lambda c=costs, s=state, d=depths, m=limit: core.list_schedule(c, 1, s, m, False, d, 0))
        line = "   ".join(f"{t * 1e6:8.1f} us {passes / t / 1e6:6.1f} M/s" for t in (simulated, scheduled))
        print(f"{stages:6} {micro_batches:13} {passes:6}   {line}")


def seconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def uneven(micro_batches: int, stages: int) -> ScheduleProblem:
    """Micro-batches whose times differ by an order of magnitude."""
    random = np.random.default_rng(0)
    shape = (micro_batches, stages)
    forward = (random.lognormal(0, 0.7, (micro_batches, 1)) * 1e7 * np.ones(shape)).astype(np.int64)
    transfer = np.full(shape, 10**5)
    first, last = transfer.copy(), transfer.copy()
    first[:, 0] = last[:, -1] = 0
    return ScheduleProblem(
        stages=stages,
        chunks=1,
        forward_ns=forward,
        backward_ns=2 * forward,
        stored_bytes=forward,
        peak_bytes=forward,
        forward_transfer_ns=last,
        backward_transfer_ns=first,
        model_state_bytes=np.zeros(stages, np.int64),
        memory_limit_bytes=2**50,
    )


if __name__ == "__main__":
    main()
