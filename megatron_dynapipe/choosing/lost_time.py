"""What a plan's own micro-batches lose: to their rows, to uneven stages, and to recomputation.

    rows             of the mean stage: its work where nothing is recomputed, and the least forward work before it
    + uneven stages  of the busiest stage
    + recomputation  the same with the modes that the plan has

Each is at most the next, and the last is the limit of these micro-batches.
"""

import numpy as np

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.sampling.global_batch import GlobalBatch
from megatron_dynapipe.ways.pieces import Pieces, of_pieces


def rows_alone(planner: Planner, batch: GlobalBatch, plan: IterationPlan) -> tuple[int, int] | None:
    """Least times, in ns, of a plan's micro-batches under any recompute modes: on the mean stage, and on the busiest.

    Of the replica that takes the longest by the second; None where replicas run in step, whose micro-batches are
    priced by the longest of each step.
    """
    if plan.in_step > 1:
        return None
    samples = planner.samples(batch)
    times = [_times(planner, samples, replica) for replica in plan.replicas if replica.micro_batches]
    return max(times, key=lambda time: time[1])


def _times(planner: Planner, samples: Samples, replica: ReplicaPlan) -> tuple[int, int]:
    problem, members = _entries(planner, samples, replica.micro_batches)
    batch_layouts = [row.layout for row in replica.micro_batches]
    stages = planner.layout.stages
    least = np.full((2, len(members), planner.layout.virtual_stages), np.iinfo(np.int64).max // 4)
    for mode in range(len(problem.modes)):
        costs, covered = problem.costs_of(members, batch_layouts, np.full(len(members), mode, np.int64))
        passes = np.stack([costs.forward_ns, costs.forward_ns + costs.backward_ns])
        least = np.where(covered[None, :, None], np.minimum(least, passes), least)
    forward, whole = least
    work = whole.sum(axis=0).reshape(-1, stages).sum(axis=0)
    before = np.cumsum(forward[:, :stages], axis=1) - forward[:, :stages]
    ends = before.min(axis=0) + work
    return int(ends.mean()), int(ends.max())


def _entries(planner: Planner, samples: Samples, rows: tuple[MicroBatch, ...]) -> tuple[BatchProblem, list[IntArray]]:
    """A problem whose samples are what the rows hold, pieces too, and the places of each row's there."""
    places = {sample: place for place, sample in enumerate(samples.ids.tolist())}
    held = [np.array([places[sample] for sample in row.sample_ids], np.int64) for row in rows]
    problem = planner.problem(samples)
    if not any(row.pieces for row in rows):
        return problem, held
    ends = np.concatenate(
        [
            np.array(row.pieces, np.int64).reshape(-1, 2)
            if row.pieces
            else np.stack([np.zeros_like(its), samples.input_positions[its]], axis=1)
            for row, its in zip(rows, held, strict=True)
        ]
    )
    sample = np.concatenate(held)
    order = np.lexsort((ends[:, 0], sample))
    start, end = ends[order].T
    pieces = Pieces(sample=sample[order], start=start, end=end, length=samples.input_positions[sample[order]])
    s = planner.settings
    cut = of_pieces(samples, problem, pieces, recompute=s.recompute, element_bytes=s.element_bytes)
    return cut.problem, np.split(np.argsort(order), np.cumsum([len(its) for its in held])[:-1])
