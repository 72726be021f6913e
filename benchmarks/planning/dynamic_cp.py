"""Megatron-LM's `default_dynamic_cp`: context parallelism by length, over the data-parallel ranks (dev branch,
`DefaultDynamicCPScheduler` and `next_hdp_group_packing_aware` of core/datasets/data_schedule*.py, commit d48bd6be).

    python -m benchmarks.planning.dynamic_cp ARGUMENTS OF compare

    micro-batch 0    ranks 0–1: a sample of 1.6 rows     rank 2: two of 0.4    rank 3: one of 0.3
    micro-batch 1    ranks 0–3: what is left, each sample over all ranks, so that none is idle

Its rows are no plan: shares of a sample run on several replicas at once. So its time is predicted here, of 1F1B on
every rank. A share of n of a sample's l positions costs what a team's member pays for it in a plan (`costing.shares`):
what a piece of n positions does that attends to (l - n) / 2 earlier ones, which is the mean of the shares that balance
attention, and gathers of keys and values. What ranks wait for one another in attention counts nothing, which favours
it, but next to nothing where groups are wide (simulated once on the mixtures of `teams`).
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli.batch_arguments import chosen_batches, longest_rows
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.cli.planning_arguments import complete_model, costs_and_rates, planner_settings
from megatron_dynapipe.core.batch import Samples, round_up_all
from megatron_dynapipe.core.costs import ATTENTION, Quantity
from megatron_dynapipe.core.errors import InfeasibleError, PlanningError
from megatron_dynapipe.core.orders import Schedule, ScheduleSettings, schedule
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout, Shape
from megatron_dynapipe.costing.shares import gathers_again, latency_ns, share_costs
from megatron_dynapipe.tools.rivals.methods import method_settings
from megatron_dynapipe.tools.rivals.pipelines import by_hand
from megatron_dynapipe.ways.rivals.rules import row_sizes

NAME = "default_dynamic_cp"


@dataclass(slots=True)
class Group:
    """Ranks that share a row of a micro-batch.

    Attributes:
        samples: of the row, as indices.
        positions: of the row on each rank.
        work: of attention on each rank, in squared positions.
    """

    ranks: int
    samples: list[int]
    positions: float = 0.0
    work: float = 0.0


def dynamic_cp(lengths: Sequence[int], positions: int, ranks: int) -> list[list[Group]]:
    """The groups of every micro-batch; their ranks follow one another, and are all ranks together.

    Args:
        lengths: of the samples, in positions.
        positions: most of a row on one rank.
        ranks: data- and context-parallel ones.

    Raises:
        PlanningError: a sample is longer than a row over all ranks.
    """
    left = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    if left and _least_ranks(lengths[left[0]], positions) > ranks:
        raise PlanningError(f"a sample of {lengths[left[0]]} positions does not fit {ranks} rows of {positions}")
    micro_batches = []
    while left:
        groups, later = _first_groups(lengths, left, positions, ranks)
        if not _widen(groups, ranks):
            row = Group(ranks, [])
            later = [sample for sample in left if not _added(row, sample, lengths[sample], positions)]
            groups = [row]
        micro_batches.append(groups)
        left = later
    return micro_batches


def _first_groups(
    lengths: Sequence[int], left: Sequence[int], positions: int, ranks: int
) -> tuple[list[Group], list[int]]:
    """Samples, the longest first, where the busiest rank is least busy afterwards; and those that found no place.

    Upstream's cap on work, 1.05 · longest · positions, is left out: Σ l² / n ≤ longest · Σ l / n ≤ longest · positions.
    """
    groups: list[Group] = []
    later = []
    for sample in left:
        length = lengths[sample]
        busiest = max((group.work for group in groups), default=0.0)
        free = ranks - sum(group.ranks for group in groups)
        best = None
        best_work = float("inf")
        for size in _sizes(_least_ranks(length, positions), ranks):
            new = [Group(size, [])] if free >= size else []
            for group in [*(other for other in groups if other.ranks == size), *new]:
                work = max(busiest, group.work + length**2 / size)
                if work < best_work and group.positions + length / size <= positions:
                    best = group
                    best_work = work
            if not groups:
                break  # the longest has no more ranks than it needs
        if best is None:
            later.append(sample)
            continue
        _added(best, sample, length, positions)
        if len(best.samples) == 1:
            groups.append(best)
    return groups, later


def _added(group: Group, sample: int, length: int, positions: int) -> bool:
    """Whether a sample has been added to a row, in which it needs room."""
    if group.positions + length / group.ranks > positions:
        return False
    group.samples.append(sample)
    group.positions += length / group.ranks
    group.work += length**2 / group.ranks
    return True


def _widen(groups: list[Group], ranks: int) -> bool:
    """Double the smallest groups, the first ones first, until no rank is idle; False where that does not come out."""
    while free := ranks - sum(group.ranks for group in groups):
        least = min(group.ranks for group in groups)
        more = min(2 * least, ranks) - least
        if more > free:
            return False
        next(group for group in groups if group.ranks == least).ranks += more
    return True


def _least_ranks(length: int, positions: int) -> int:
    """A power of two."""
    return 1 << (-(-length // positions) - 1).bit_length()


def _sizes(least: int, most: int) -> Iterator[int]:
    while least <= most:
        yield least
        least *= 2


def milliseconds(args: argparse.Namespace) -> list[float | None]:
    """The predicted time of every batch of `compare`'s arguments, in the fastest pipeline; None where none fits."""
    complete_model(args)
    cost_model, _ = costs_and_rates(args)
    settings = planner_settings(args, cost_model, choose=False)
    batches = chosen_batches(args)
    found = []
    for batch in batches:
        longest = longest_rows(args, batch, batches)
        lengths = batch.global_batch(0)
        runs: list[RowsRun] = []
        for pipeline in by_hand(settings, cost_model, lengths, chunks=(1,)):
            planner = planner_of(method_settings("packed_rows", longest, pipeline), cost_model)
            samples = planner.samples(lengths)
            positions = (samples.input_positions + samples.target_positions).tolist()
            ranks = 1 << (settings.data_parallel.bit_length() - 1)
            try:
                sizes = row_sizes(positions, max(longest.inputs, *positions), ranks)
                runs.append(fastest_run(planner, samples, sizes))
            except PlanningError:
                continue
        found.append(min((run.makespan_ns / 1e6 for run in runs), default=None))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRun:
    """The outcome of rows that are no plan on a batch.

    Attributes:
        shapes: of the rows of all ranks.
    """

    schedules: list[Schedule]
    shapes: list[Shape]

    @property
    def makespan_ns(self) -> int:
        """The time of the slowest rank."""
        return max(schedule.makespan_ns for schedule in self.schedules)


def fastest_run(planner: Planner, samples: Samples, row_sizes: Iterable[int]) -> RowsRun:
    """The fastest run over recompute modes and sizes of rows, which are the most positions of a row on one rank.

    Raises:
        PlanningError: there are virtual stages, for which its micro-batches are divided further, or a long sample has
            a target, which cannot be divided.
        InfeasibleError: none fits the memory.
    """
    if planner.layout.chunks > 1:
        raise PlanningError("default_dynamic_cp is not predicted with virtual stages")
    lengths = (samples.input_positions + samples.target_positions).tolist()
    runs = []
    for positions in row_sizes:
        micro_batches = dynamic_cp(lengths, positions, planner.settings.data_parallel)
        problem, rows = _sharded(planner, samples, micro_batches)
        runs += [run] if (run := fastest_mode(problem, rows)) is not None else []
    if not runs:
        raise InfeasibleError("no rows of default_dynamic_cp fit the memory")
    return min(runs, key=lambda run: run.makespan_ns)


def _sharded(
    planner: Planner, samples: Samples, micro_batches: list[list[Group]]
) -> tuple[BatchProblem, list[list[IntArray]]]:
    """The problem of all shares, and for every rank the shares of its rows: indices into the problem's samples."""
    shares: dict[tuple[int, int], int] = {}
    rows: list[list[IntArray]] = [[] for _ in range(planner.settings.data_parallel)]
    for groups in micro_batches:
        row = [np.array([shares.setdefault((i, one.ranks), len(shares)) for i in one.samples]) for one in groups]
        of_ranks = [entries for entries, one in zip(row, groups, strict=True) for _ in range(one.ranks)]
        for rank, entries in enumerate(of_ranks):
            rows[rank].append(entries)
    of, parts = np.array(list(shares), np.int64).T
    if (samples.target_positions[of[parts > 1]] > 0).any():
        raise PlanningError("default_dynamic_cp divides samples of decoder-only models alone")
    whole = samples.input_positions[of]
    targets = samples.target_positions[of]
    part = -(-whole // parts)
    problem = planner.problem(samples)
    is_share = parts > 1
    its, network = planner.settings, planner.settings.network
    # The gathers of a row are waited for once.
    is_first = np.isin(of, [one.samples[0] for groups in micro_batches for one in groups])
    latency = latency_ns(parts, network, tensor_parallel=its.tensor_parallel) * is_share * is_first
    costs = []
    for tables, mode in zip(problem.modes, its.recompute, strict=True):
        extras = share_costs(
            tables,
            mode,
            chunk=-(-part // 2) * is_share,
            ranks=parts,
            element_bytes=its.element_bytes,
            network=network,
            tensor_parallel=its.tensor_parallel,
        )
        attention = extras[:, tables.kinds.index(ATTENTION)]
        attention[:, Quantity.FORWARD] += latency
        attention[:, Quantity.BACKWARD] += gathers_again(mode) * latency
        costs.append(extras)
    changed = replace(
        problem,
        inputs=round_up_all(part),
        targets=round_up_all(targets),
        input_positions=part,
        target_positions=targets,
        chains=np.where(is_share, np.cumsum(is_share) - 1, -1).astype(np.int32) if is_share.any() else None,
        piece_costs=np.stack(costs),
    )
    return changed, rows


def fastest_mode(problem: BatchProblem, rows: list[list[IntArray]]) -> RowsRun | None:
    """Every rank's rows under 1F1B and the best of the recompute modes; None where none fits."""
    runs = [run for mode in range(len(problem.modes)) if (run := _run(problem, rows, mode)) is not None]
    return min(runs, key=lambda run: run.makespan_ns, default=None)


def _run(problem: BatchProblem, rows: list[list[IntArray]], mode: int) -> RowsRun | None:
    """Every rank's rows under 1F1B and one recompute mode; None where one does not fit."""
    schedules = []
    shapes = []
    for replica_rows in rows:
        batch_layouts = [BatchLayout.PACKED] * len(replica_rows)
        costs, covered = problem.costs_of(replica_rows, batch_layouts, np.full(len(replica_rows), mode, np.int64))
        if not covered.all():
            return None
        try:
            schedules.append(schedule(costs, ScheduleSettings(method="1f1b")))
        except InfeasibleError:
            return None
        shapes += [problem.shape(row, BatchLayout.PACKED) for row in replica_rows]
    return RowsRun(schedules=schedules, shapes=shapes)


def main() -> None:
    """Print the predicted time of every batch."""
    args = build_parser("compare").parse_args(["compare", *sys.argv[1:]])
    times = milliseconds(args)
    for batch, ms in zip(chosen_batches(args), times, strict=True):
        print(f"{batch.id}: {NAME} {'no plan' if ms is None else f'{ms:.1f} ms'}")


if __name__ == "__main__":
    main()
