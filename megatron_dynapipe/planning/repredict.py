"""What a plan would take under other costs than those it was made with."""

import numpy as np

from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.problem import BatchProblem
from megatron_dynapipe.planning.simulate import simulate
from megatron_dynapipe.sampling import GlobalBatch


def repredicted_ns(plan: IterationPlan, batch: GlobalBatch, planner: Planner) -> int | None:
    """Time of a plan's slowest replica by the costs of a planner; None where these do not cover a micro-batch.

    Args:
        plan: of the batch.
        batch: the samples that the plan was made for.
        planner: of the same model, layout and recompute modes.
    """
    samples = planner.samples(batch)
    problem = planner.problem(samples, forward_only=plan.forward_only)
    place = {sample: index for index, sample in enumerate(samples.ids.tolist())}
    times = [_replica_ns(replica, problem, place, planner) for replica in plan.replicas]
    return None if None in times else max(ns for ns in times if ns is not None)


def _replica_ns(replica: ReplicaPlan, problem: BatchProblem, place: dict[int, int], planner: Planner) -> int | None:
    batches = replica.micro_batches
    members = [np.array([place[sample] for sample in each.sample_ids], np.int64) for each in batches]
    modes = np.array([planner.settings.recompute.index(each.recompute) for each in batches], np.int64)
    costs, covered = problem.costs_of(members, [each.layout for each in batches], modes)
    if not covered.all():
        return None
    order = tuple(
        tuple(each for each in stage.instructions if isinstance(each, Forward | Backward)) for stage in replica.stages
    )
    return simulate(costs, order).makespan_ns
