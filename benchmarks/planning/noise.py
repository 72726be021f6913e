"""How searched plans hold up when passes take other times than predicted, against 1F1B over the same micro-batches.

    python benchmarks/planning/noise.py [--layout auto] [--settings t5:1,1,8 …]

Every pass of every draw takes up to 10% (30%) more or less than predicted, 100 draws per batch. Printed, as means over
the batches, for the searched order and for 1F1B's: the time lost against what the same order predicts, on average and
in the worst draw, in ms and in percent; and the searched order's predicted and average real time over 1F1B's.
"""

import argparse
import dataclasses
from collections.abc import Iterator

import numpy as np
from cases import batches, planner

from megatron_dynapipe.planning.problem import IntArray, PassOrder, ScheduleProblem
from megatron_dynapipe.planning.repredict import costs_and_order
from megatron_dynapipe.planning.schedules.one_f_one_b import one_f_one_b_within_memory
from megatron_dynapipe.planning.simulate import simulate
from megatron_dynapipe.units import NS_PER_MS, BatchLayout

Case = tuple[ScheduleProblem, tuple[PassOrder, PassOrder]]
LAYOUTS = {"auto": tuple(BatchLayout), "padded": (BatchLayout.PADDED,), "packed": (BatchLayout.PACKED,)}
LONGEST = 4096
DRAWS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=("gpt:1,1,8", "gpt:1,2,4", "t5:1,1,8", "t5:1,2,4"))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="auto", help="of micro-batches")
    args = parser.parse_args()
    print(f"{'':18}   {'searched loses':>37}   {'1F1B loses':>37}   {'searched / 1F1B':>15}")
    print(
        f"{'setting':12} {'jitter':>6}   "
        + f"{'mean ms':>9} {'%':>8} {'worst ms':>9} {'%':>8}   " * 2
        + "predicted   real"
    )
    for setting in args.settings:
        cases = list(orders(setting, LAYOUTS[args.layout]))
        for spread in (0.1, 0.3):
            lost, ratios = (
                np.mean(each, axis=0)
                for each in zip(*(degradation(problem, pair, spread) for problem, pair in cases), strict=True)
            )
            words = "   ".join(f"{mean:9.1f} {part:8.2%} {worst:9.1f} {most:8.2%}" for mean, part, worst, most in lost)
            print(f"{setting:12} {spread:6.0%}   {words}   {ratios[0]:9.3f} {ratios[1]:6.3f}", flush=True)


def orders(setting: str, layouts: tuple[BatchLayout, ...]) -> Iterator[Case]:
    """Of every batch, its planned micro-batches with the planned order and 1F1B's."""
    planned_by = planner(setting, micro_batch_layouts=layouts)
    assert planned_by.settings.data_parallel == 1, "one replica"
    for batch in batches(planned_by.settings.family, longest=LONGEST):
        planned = costs_and_order(planned_by.plan(batch, 0), 0, batch, planned_by)
        assert planned is not None, "its own costs"
        problem, order = planned
        yield problem, (order, one_f_one_b_within_memory(problem))


def degradation(
    problem: ScheduleProblem, pair: tuple[PassOrder, PassOrder], spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of each order, what it loses [mean ms, share, worst ms, share]; the first over the second [predicted, real]."""
    random = np.random.default_rng(0)
    predicted = np.array([simulate(problem, order).makespan_ns for order in pair]) / NS_PER_MS
    draws = [jittered(problem, spread, random) for _ in range(DRAWS)]
    times = np.array([[simulate(draw, order).makespan_ns for order in pair] for draw in draws]) / NS_PER_MS
    mean, worst = times.mean(axis=0) - predicted, times.max(axis=0) - predicted
    lost = np.stack([mean, mean / predicted, worst, worst / predicted], axis=1)
    return lost, np.array([predicted[0] / predicted[1], times[:, 0].mean() / times[:, 1].mean()])


def jittered(problem: ScheduleProblem, spread: float, random: np.random.Generator) -> ScheduleProblem:
    def changed(times: IntArray) -> IntArray:
        return np.rint(times * random.uniform(1 - spread, 1 + spread, times.shape)).astype(np.int64)

    return dataclasses.replace(
        problem, forward_ns=changed(problem.forward_ns), backward_ns=changed(problem.backward_ns)
    )


if __name__ == "__main__":
    main()
