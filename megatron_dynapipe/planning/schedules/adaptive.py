"""The best of 1F1B and a few list schedules: the schedule `adaptive` where micro-batches are given in their order.

Where the planner also partitions the batch, the search (`planning.search`) does more: it begins with these.
"""

from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem
from megatron_dynapipe.planning.schedules.list_scheduling import Policy, Rule, list_schedule
from megatron_dynapipe.planning.schedules.one_f_one_b import filling_depths, one_f_one_b_within_memory
from megatron_dynapipe.planning.simulate import simulate_all

DEEPENINGS = (0, 1, 3, 8)
"""Micro-batches in flight beyond those that fill the pipeline, as tried by `adaptive`."""


def adaptive(problem: ScheduleProblem) -> PassOrder:
    """The best of (interleaved) 1F1B and the list schedules of a few policies, for the micro-batches in index order."""
    plain = one_f_one_b_within_memory(problem)
    scheduled = [order for policy in policies(problem) if (order := list_schedule(problem, policy)) is not None]
    runs = simulate_all(problem, (plain, *scheduled))
    fitting = [(run, order) for run, order in runs if max(run.peak_bytes) <= problem.memory_limit_bytes]
    return min(fitting or runs, key=lambda candidate: candidate[0].makespan_ns)[1]


def policies(problem: ScheduleProblem) -> list[Policy]:
    """Policies to try: every rule, at 1F1B's depths and deeper; the last stage turns each micro-batch round at once."""
    base = filling_depths(problem.stages, problem.chunks)
    return [Policy((*(depth + extra for depth in base[:-1]), 1), rule) for extra in DEEPENINGS for rule in Rule]
