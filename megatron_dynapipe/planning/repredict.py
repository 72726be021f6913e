"""What a plan would take under other costs than those it was made with."""

import numpy as np

from megatron_dynapipe.plan.instructions import Pass
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem
from megatron_dynapipe.planning.simulate import simulate
from megatron_dynapipe.sampling import GlobalBatch


def repredicted_ns(plan: IterationPlan, batch: GlobalBatch, planner: Planner) -> int | None:
    """Time of a plan's slowest replica by the costs of a planner; None where these do not cover a micro-batch.

    Args:
        plan: of the batch.
        batch: the samples that the plan was made for.
        planner: of the same model, layout and recompute modes.
    """
    replicas = [costs_and_order(plan, replica, batch, planner) for replica in range(len(plan.replicas))]
    return None if None in replicas else max(simulate(*each).makespan_ns for each in replicas if each is not None)


def costs_and_order(
    plan: IterationPlan, replica: int, batch: GlobalBatch, planner: Planner
) -> tuple[ScheduleProblem, PassOrder] | None:
    """One replica's micro-batches by the costs of a planner, and the plan's order of passes; None as above."""
    samples = planner.samples(batch)
    problem = planner.problem(samples, forward_only=plan.forward_only)
    place = {sample: index for index, sample in enumerate(samples.ids.tolist())}
    batches = plan.replicas[replica].micro_batches
    members = [np.array([place[sample] for sample in each.sample_ids], np.int64) for each in batches]
    modes = np.array([planner.settings.recompute.index(each.recompute) for each in batches], np.int64)
    costs, covered = problem.costs_of(members, [each.layout for each in batches], modes)
    if not covered.all():
        return None
    stages = plan.replicas[replica].stages
    order = tuple(tuple(each for each in stage.instructions if isinstance(each, Pass)) for stage in stages)
    return costs, order
