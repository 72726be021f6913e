"""Plans over the best order of their passes: branch and bound on small pipelines.

    python -m benchmarks.planning.optimum [--cases 60] [--seed 0]

A case is a pipeline of two to four stages of a small GPT and three to six samples, each a micro-batch of its own, under
memory that holds all of them or about half. Passes are whole. Printed are how many plans lie how far above the optimum,
their mean, and cases that are left out since too many orders would have to be tried.
"""

import argparse
import heapq
import operator
import statistics
from collections import Counter

import numpy as np

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import CPU_RATES, AnalyticCostModel, ModelShape, model_of_layers
from megatron_dynapipe.sampling import GlobalBatch

MOST_ORDERS = 300_000
"""Partial orders that a case may take."""
BIN = 0.005


Stages = tuple[int, ...]
"""A number for every stage."""
Ready = dict[tuple[bool, int, int], int]
"""When the input of the next pass of every micro-batch is there, by (is forward, micro-batch, stage)."""


class TooManyOrdersError(Exception):
    """A case would take too long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random, ratios, left_out = np.random.default_rng(args.seed), [], 0
    for _ in range(args.cases):
        try:
            if (ratio := over_optimum(random)) is not None:
                ratios.append(ratio)
        except TooManyOrdersError:
            left_out += 1
    for at, count in sorted(Counter(int((ratio - 1) / BIN + 1e-9) for ratio in ratios).items()):
        print(f"{1 + at * BIN:.3f} {'#' * count} {count}")
    print(f"mean {statistics.mean(ratios):.4f}, most {max(ratios):.4f}, {len(ratios)} cases, {left_out} left out")


def over_optimum(random: np.random.Generator) -> float | None:
    """A plan's time over that of the best order of its passes, of a random case; None where no plan fits."""
    stages, lengths = (
        int(random.integers(2, 5)),
        np.exp(random.normal(5.5, 0.8, random.integers(3, 7))).astype(np.int32),
    )
    shape = ModelShape(family=ModelFamily.GPT, hidden=128, heads=4, kv_channels=32, ffn=512, vocabulary=4096)
    costs = AnalyticCostModel(shape, CPU_RATES, max_size=8, max_length=2048)
    settings = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, 2 * stages),
        hidden_size=128,
        pipeline_parallel=stages,
        memory_limit_bytes=int(random.choice([2 * 10**9, 6 * 10**7])),
        recompute=(Recompute.NONE,),
        micro_batch_layouts=(BatchLayout.PACKED,),
    )
    lengths = np.clip(lengths, 8, 1500)
    batch = GlobalBatch.of_lengths(lengths)
    try:
        planner = planner_of(settings, costs)
        (replica,) = planner.plan(batch, 0).replicas
    except InfeasibleError:
        return None
    rows = [np.array(micro_batch.sample_ids) for micro_batch in replica.micro_batches]
    problem, _ = planner.problem(planner.samples(batch)).costs_of(
        rows, [BatchLayout.PACKED] * len(rows), np.zeros(len(rows), np.int64)
    )
    # What a plan holds in messages is left out of the optimum's memory, which can only make it faster.
    return replica.predicted_ns / best_makespan(problem, replica.predicted_ns, most_orders=MOST_ORDERS)


def best_makespan(problem: ScheduleProblem, known_ns: int = 1 << 60, *, most_orders: int | None = None) -> int:
    """The least time of any active order of whole passes within memory, by branch and bound over the next pass.

    In an active order no pass could run earlier without another running later. Messages take no memory. Begins from
    what a known order takes; raises TooManyOrdersError where more than `most_orders` parts of orders would be tried.
    """
    stages, rows = problem.stages, range(problem.micro_batches)
    bound = _Bound(problem)
    times = {True: problem.forward_ns.tolist(), False: problem.backward_ns.tolist()}
    stored, peak = problem.stored_bytes.tolist(), problem.peak_bytes.tolist()
    room = (problem.memory_limit_bytes - problem.model_state_bytes).tolist()
    sent = {True: problem.forward_transfer_ns.tolist(), False: problem.backward_transfer_ns.tolist()}
    best, tried = known_ns, 0

    def search(free: Stages, ready: Ready, held: Stages) -> None:
        nonlocal best, tried
        tried += 1
        if most_orders is not None and tried > most_orders:
            raise TooManyOrdersError
        if not ready:
            best = min(best, max(free))
        if not ready or bound.reaches(best, free, ready):
            return
        fits = (key for key in ready if not key[0] or held[key[2]] + peak[key[1]][key[2]] <= room[key[2]])
        starts = {key: max(free[key[2]], ready[key]) for key in fits}
        least = min((start + times[key[0]][key[1]][key[2]] for key, start in starts.items()), default=0)
        for key in sorted(starts, key=starts.__getitem__):
            forward, row, stage = key
            if starts[key] >= least:
                continue  # another pass could run before: the order is not active
            time = times[forward][row][stage]
            end = starts[key] + time
            after = {other: at for other, at in ready.items() if other != key}
            following = stage + 1 if forward else stage - 1
            if forward and following == stages:
                after[False, row, stage] = end
            elif following >= 0:
                after[forward, row, following] = end + sent[forward][row][stage]
            change = stored[row][stage] if forward else -stored[row][stage]
            search(_with(free, stage, end - free[stage]), after, _with(held, stage, change))

    search((0,) * stages, {(True, row, 0): 0 for row in rows}, (0,) * stages)
    return best


class _Bound:
    """Which parts of orders cannot be faster than the best one so far, or than another part of the same passes."""

    def __init__(self, problem: ScheduleProblem) -> None:
        stages = range(problem.stages)
        self._chain = [(True, stage) for stage in stages] + [(False, stage) for stage in reversed(stages)]
        times = {True: problem.forward_ns.tolist(), False: problem.backward_ns.tolist()}
        sent = {True: problem.forward_transfer_ns.tolist(), False: problem.backward_transfer_ns.tolist()}
        self._passes = [
            [(stage, times[kind][row][stage], sent[kind][row][stage]) for kind, stage in self._chain]
            for row in range(problem.micro_batches)
        ]
        self._after = [
            [sum(time + sent for _, time, sent in passes[step + 1 :]) + passes[step][2] for step in range(len(passes))]
            for passes in self._passes
        ]  # of a micro-batch, from the end of a pass on
        self._seen: dict[frozenset[tuple[bool, int, int]], list[Stages]] = {}

    def reaches(self, best: int, free: Stages, ready: Ready) -> bool:
        now, others = (*free, *(ready[key] for key in sorted(ready))), self._seen.setdefault(frozenset(ready), [])
        if any(all(map(operator.le, earlier, now)) for earlier in others):
            return True
        others.append(now)
        return any(_of_stage(passes) >= best for passes in self._left(free, ready))

    def _left(self, free: Stages, ready: Ready) -> list[list[tuple[int, int, int]]]:
        """Of every stage the passes that are left: when they can begin at the earliest, their time, what follows."""
        left: list[list[tuple[int, int, int]]] = [[] for _ in free]
        for (kind, row, stage), at in ready.items():
            first = self._chain.index((kind, stage))
            for (on, time, sent), after in zip(self._passes[row][first:], self._after[row][first:], strict=True):
                begins = max(at, free[on])
                left[on].append((begins, time, after))
                at = begins + time + sent
        return left


def _of_stage(passes: list[tuple[int, int, int]]) -> int:
    """The least time to the end of what one stage has to run, if a pass may be broken off for one with more after it.

    No order that runs passes whole is faster than always to run the one, of those that can begin, that most follows
    (Jackson's preemptive schedule).
    """
    waiting: list[tuple[int, int]] = []
    now = ends = 0
    coming = sorted(passes, reverse=True)
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, time, after = coming.pop()
            heapq.heappush(waiting, (-after, time))
        after, time = heapq.heappop(waiting)
        until = min(now + time, coming[-1][0]) if coming else now + time
        if until < now + time:
            heapq.heappush(waiting, (after, now + time - until))
        else:
            ends = max(ends, until - after)
        now = until
    return ends


def _with(values: Stages, at: int, change: int) -> Stages:
    return (*values[:at], values[at] + change, *values[at + 1 :])


if __name__ == "__main__":
    main()
