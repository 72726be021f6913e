"""What no plan of a batch can beat: a ladder of lower bounds, each at least the one before.

    devices        every sample's least work, over all devices
    stages         the best split of the modules into stages: a stage's least work, and the forward work before it; and
                   the way of the longest sample through all modules and back, which few micro-batches cannot hide
    memory         the same with as much recomputation as memory asks for; on one stage, in rows that are no longer than
                   a replica's work allows, too
    split          any micro-batches under the plan's own split: how they fill its stages, with what each takes by
                   itself (`filling`)
    micro_batches  of the plan's own micro-batches: a stage's work, the least forward work before it and, if backward
                   passes are whole, the least backward work after it (`least_of`)
    the plan

A sample's least work is its share of the micro-batch that runs it best, of any size, padded or packed, whole or in
pieces, where these are allowed. Costs count as if they never fell with length (each is taken for the least of all that
are as long or longer), so that a share is below what any micro-batch takes for the sample.

Memory: at the end of its forward pass a micro-batch is held by all stages, so that it has no more positions than all
memory beside model states holds under the recompute modes that store the least, which bounds how well its samples run.
And a stage holds what a sample stores from its forward to its backward, at least while the sample goes on to the last
stage and back. Over T this is at most memory · T. For every price p of memory, with x the choice of modes,

    T ≥ before + Σ x · time  and  Σ x · stored · held ≤ memory · T   give   T ≥ (before + min Σ x · (time + p / memory ·
    stored · held)) / (1 + p),

which is the dual of the linear programme over modes; the largest of a few prices is taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.planning.filling import fastest_filling
from benchmarks.planning.stage_work import StageWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli.batch_arguments import chosen_batches
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.cli.planning_arguments import costs_and_settings
from megatron_dynapipe.core.instructions import Forward, Pass
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.sampling import GlobalBatch

PRICES = (0.0, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 5.0)
"""Of memory, from none."""


class Limits(NamedTuple):
    """Lower bounds on a batch's time under a layer split, in ns: the ladder's first four."""

    devices: int
    stages: int
    memory: int
    split: int


def limits(planner: Planner, batch: GlobalBatch) -> Limits:
    """The bounds of a training iteration, whatever its plan.

    Args:
        planner: model, layout, memory, costs, what is allowed.
        batch: what is planned.
    """
    work = StageWork(planner, planner.samples(batch))
    devices = work.everywhere(work.time)
    stages = max(devices, work.best_layer_split(work.time, PRICES[:1]), work.longest_way())
    memory = max(stages, work.best_layer_split(work.fitting_time, PRICES))
    if planner.layout.virtual_stages == 1 and planner.settings.replicas_in_step == 1:
        split = memory = max(memory, work.on_one_stage())
    else:
        split = max(memory, fastest_filling(work))
    return Limits(devices, stages, memory, split)


def of_arguments(words: Sequence[str]) -> list[Limits]:
    """The bounds of every batch that the arguments of `plan` or `compare` name, command first."""
    args = build_parser(words[0]).parse_args(words)
    cost_model, settings = costs_and_settings(args)
    planner = planner_of(settings, cost_model)
    return [limits(planner, batch.global_batch(0)) for batch in chosen_batches(args)]


def least_of(planner: Planner, plan: IterationPlan) -> int:
    """The last of the ladder: what the plan's own micro-batches take in any order, in ns."""
    divides = planner.settings.effective_split_backward != "off"
    return max(_of_replica(replica, divides=divides) for replica in plan.replicas)


def _of_replica(replica: ReplicaPlan, *, divides: bool) -> int:
    """`least_around` of the micro-batches that a replica runs."""
    forward = np.zeros((len(replica.micro_batches), len(replica.stages)), np.int64)
    backward, work = np.zeros_like(forward), np.zeros(len(replica.stages), np.int64)
    for stage, plan in enumerate(replica.stages):
        for event in plan.predicted:
            step, time = event.instruction, event.end_ns - event.start_ns
            work[stage] += time
            if isinstance(step, Pass) and step.chunk == 0:
                (forward if isinstance(step, Forward) else backward)[step.micro_batch, stage] += time
    return least_around(work, *[forward] if divides else [forward, backward])


def least_around(work: IntArray, *ways: IntArray) -> int:
    """A stage's work and the least way to it, and the least way back where that is whole, which may be another row's.

    Args:
        work: int64[stages].
        ways: forward, and backward passes on the first chunk: int64[micro-batches, stages] each.
    """
    if not len(ways[0]):
        return 0
    return max(int(sum(way[:, :stage].sum(axis=1).min() for way in ways) + work[stage]) for stage in range(len(work)))
