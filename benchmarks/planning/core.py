"""How fast ordering, partition and balance are, and how good the cuts, against the published planner.

    python benchmarks/planning/core.py [--settings t5:1,4,2 …] [--large] [--quality]

One core. Times are medians of processor time; ratios are the published planner's whole planning time over ours for the
same batch and layout (`benchmarks/data/published`). `--quality` holds objectives against the published order and
partition, re-implemented in `published.py`.
"""

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import BATCHES, planner, published_results
from published import published_objective, published_order

from megatron_dynapipe.cli.batches import NamedBatch, read_batches
from megatron_dynapipe.planning.balance import assign
from megatron_dynapipe.planning.partition import Partition, candidate_orders, partition
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.problem import BatchProblem
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.units import ModelFamily

SETTINGS = (
    *("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "gpt:4,2,4"),
    *("t5:1,1,8", "t5:1,2,4", "t5:1,4,2", "t5:2,2,2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--large", action="store_true", help="also batches of 262,144 and 1,048,576 tokens")
    parser.add_argument("--quality", action="store_true", help="objectives against the published order and partition")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    published = {
        (r["model"], r["data_parallel"], r["tensor_parallel"], r["pipeline_parallel"], r["batch"]): r
        for r in published_results()
    }
    for setting in args.settings:
        model, _, numbers = setting.partition(":")
        layout = tuple(map(int, numbers.split(",")))
        planned_by = planner(setting)
        named = read_batches(BATCHES, ModelFamily(model))
        for tokens in (65536, 262144, 1048576) if args.large else (65536,):
            chosen = [batch for batch in named if f"-t{tokens}-" in batch.id]
            speed(planned_by, layout, tokens, chosen, published, args.repeat)
            if args.quality and tokens == 65536:
                quality(planned_by, chosen)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def speed(
    planner: Planner, layout: tuple[int, int, int], tokens: int, batches: list[NamedBatch], published: dict, repeat: int
) -> None:
    """A line: the time of each phase, and how many times faster than the published planner's whole planning."""
    settings = planner.settings
    phases: dict[str, list[float]] = {"ordering": [], "partition": [], "balance": []}
    ratios = []
    for batch in batches:
        runs = [core(planner, batch) for _ in range(repeat)]
        if runs[0] is None:
            continue
        for phase, values in phases.items():
            values.append(statistics.median(run[phase] for run in runs))
        theirs = published.get((settings.family, *layout, batch.id))
        if theirs and "planning_seconds" in theirs:
            ratios.append(theirs["planning_seconds"] * 1e3 / sum(values[-1] for values in phases.values()))
    totals = [sum(parts) for parts in zip(*phases.values(), strict=True)]
    ratio = f"x{statistics.geometric_mean(ratios):.0f}" if ratios else "-"
    print(
        f"{settings.family:4} {'{},{},{}'.format(*layout):6} {tokens:8} tokens  "
        + "  ".join(f"{phase} {statistics.median(values):7.2f}" for phase, values in phases.items())
        + f"  total {statistics.median(totals):7.2f} (worst {max(totals):7.2f}) ms  faster {ratio}",
        flush=True,
    )


def core(planner: Planner, batch: NamedBatch) -> dict[str, float] | None:
    """Milliseconds of each phase, or None where the batch has no plan."""
    start = time.process_time()
    samples = Samples.of(batch.global_batch(0), planner.settings.family)
    orders = candidate_orders(samples.inputs, samples.targets)
    ordered = time.process_time()
    problem = planner.problem(samples)
    found = partition(problem, orders)
    if not found.partitions:
        return None
    partitioned = time.process_time()
    for each in found.partitions:
        assigned(problem, found.order, each)
    balanced = time.process_time()
    return {
        "ordering": (ordered - start) * 1e3,
        "partition": (partitioned - ordered) * 1e3,
        "balance": (balanced - partitioned) * 1e3,
    }


def assigned(problem: BatchProblem, order: np.ndarray, found: Partition) -> int:
    """Assign the partition's micro-batches to replicas; how many the replica of most has."""
    shapes = [problem.shape(members) for members in found.members(order)]
    return max(map(len, assign(problem.costs(shapes, found.modes)[0].stage_times_ns, problem.replicas)))


def quality(planner: Planner, batches: list[NamedBatch]) -> None:
    """Two lines: our partition over the published one on its order, and our order over the published order."""
    same_order, ours_over_theirs = [], []
    for batch in batches:
        samples = Samples.of(batch.global_batch(0), planner.settings.family)
        problem = planner.problem(samples)
        their_order = published_order(samples.inputs, samples.targets)
        on_theirs = objectives(problem, [their_order])
        on_ours = objectives(problem, candidate_orders(samples.inputs, samples.targets))
        for mine, its in zip(on_ours, on_theirs, strict=True):
            if mine is not None and its is not None:
                ours_over_theirs.append(mine / its)
        theirs = published_objective(problem, their_order)
        best = [each for each in on_theirs if each is not None]
        if theirs is not None and best:
            same_order.append(min(best) / theirs)
    for name, values in (("on the published order, over its cut", same_order), ("after our order", ours_over_theirs)):
        if values:
            mean = statistics.fmean(values)
            print(
                f"      objective {name}: mean {mean:.4f}, least {min(values):.4f}, most {max(values):.4f}", flush=True
            )


def objectives(problem: BatchProblem, orders: list[np.ndarray]) -> list[int | None]:
    """Of the best partition for each option of micro-batches in flight, in ns times replicas; None where none fits."""
    _, found = problem.native.partition(orders=orders, improve=len(orders) > 1)
    return [warmup * problem.replicas + total if sizes else None for sizes, _, warmup, total in found]


if __name__ == "__main__":
    main()
