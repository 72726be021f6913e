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
from published import published_cut, published_order

from megatron_dynapipe.cli.batches import NamedBatch, read_batches
from megatron_dynapipe.planning.balance import deal
from megatron_dynapipe.planning.ordering import sweeps
from megatron_dynapipe.planning.partition import Cut, cut
from megatron_dynapipe.planning.planner import Planner
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
    orders = sweeps(samples.inputs, samples.targets)
    ordered = time.process_time()
    found = cut(planner.cut_problem(samples, planner.in_flight_options()), orders, refine=len(orders) > 1)
    cuts = [each for each in found.cuts if each is not None]
    if not cuts:
        return None
    partitioned = time.process_time()
    for each in cuts:
        deal_out(planner, samples, found.order, each)
    dealt = time.process_time()
    return {
        "ordering": (ordered - start) * 1e3,
        "partition": (partitioned - ordered) * 1e3,
        "balance": (dealt - partitioned) * 1e3,
    }


def deal_out(planner: Planner, samples: Samples, order: np.ndarray, found: Cut) -> int:
    """Deal the cut's micro-batches to replicas; how many the largest hand holds."""
    members = np.split(order, np.cumsum(found.sizes)[:-1])
    problem = planner.pipeline_problem([samples.shape(rows) for rows in members], found.modes)
    return max(map(len, deal(problem.forward_ns + problem.backward_ns, planner.settings.data_parallel)))


def quality(planner: Planner, batches: list[NamedBatch]) -> None:
    """Two lines: our partition over the published one on its order, and our order over the published order."""
    replicas = planner.settings.data_parallel
    same_order, ours_over_theirs = [], []
    for batch in batches:
        samples = Samples.of(batch.global_batch(0), planner.settings.family)
        problem = planner.cut_problem(samples, planner.in_flight_options())
        last = len(problem.in_flight) - 1
        their_order = published_order(samples.inputs, samples.targets)
        on_theirs = cut(problem, [their_order], refine=False).cuts
        orders = sweeps(samples.inputs, samples.targets)
        on_ours = cut(problem, orders, refine=len(orders) > 1).cuts
        for mine, its in zip(on_ours, on_theirs, strict=True):
            if mine is not None and its is not None:
                ours_over_theirs.append(mine.objective(replicas, 1) / its.objective(replicas, 1))
        theirs = published_cut(problem.reordered(their_order), 0, last)
        best = [each.objective(replicas, 1) for each in on_theirs if each is not None]
        if theirs is not None and best:
            same_order.append(min(best) / theirs.objective(replicas, 1))
    for name, values in (("on the published order, over its cut", same_order), ("after our order", ours_over_theirs)):
        if values:
            mean = statistics.fmean(values)
            print(
                f"      objective {name}: mean {mean:.4f}, least {min(values):.4f}, most {max(values):.4f}", flush=True
            )


if __name__ == "__main__":
    main()
