"""What no plan of a batch can beat: a ladder of lower bounds, each at least the one before, and what lies between them.

    devices        every sample's least work, over all devices
    stages         the best split of the modules into stages: a stage's least work, and the forward work before it; and
                   the way of the longest sample through all modules and back, which few micro-batches cannot hide
    memory         the same with as much recomputation as memory asks for; on one stage, in rows that are no longer than
                   a replica's work allows, too
    split          any micro-batches under the plan's own split: how they fill its stages, with what each takes by
                   itself (`choosing.filling`)
    micro_batches  of the plan's own micro-batches: a stage's work, the least forward work before it and, if backward
                   passes are whole, the least backward work after it; what this is more is lost to rows, uneven stages
                   or recomputation (`choosing.lost_time`)
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

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.choosing.filling import fastest_filling
from megatron_dynapipe.choosing.least_work import PROVEN, LeastWork, has_one_stage
from megatron_dynapipe.choosing.lost_time import rows_alone
from megatron_dynapipe.core.instructions import Forward, Pass
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.sampling.global_batch import GlobalBatch

PRICES = (0.0, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 5.0)
"""Of memory, from none."""
WORK = "work"
"""The share of the time that every plan of the batch takes, on these devices."""
ADVISED = 0.1
"""A loss of this share of the time comes with an advice."""


CAUSES: Mapping[str, str] = {
    "stages": "filling the pipeline and dividing the layers",
    "memory": "recomputation that memory asks for",
    "micro-batches": "short rows and uneven stages",
    "rows": "short rows",
    "uneven stages": "uneven stages",
    "recomputation": "more recomputation than memory asks for",
    "order": "waits between stages",
    "prediction": "passes that took longer than predicted",
    "waits": "waiting for the plan",
}
"""What time is lost to, by the names of `Limits.shares`."""
ADVICE: Mapping[str, str] = {
    "stages": "Fewer stages, or batches of more samples, would lose less",
    "memory": "A higher memory limit, or more stages, would need less recomputation",
    "micro-batches": "Batches of more samples would run short rows better",
    "rows": "Batches of more samples would run short rows better",
    "uneven stages": "Another split of the layers (--dynapipe-layers-per-stage) may even them out",
    "recomputation": "A higher memory limit, or more stages, would need less recomputation",
    "order": "Batches of more samples would have fewer waits",
    "prediction": "Costs that are measured while the machine is quiet would predict better",
    "waits": "More cores to plan on would have it ready in time (--dynapipe-planner-cores)",
}
"""What would lose less."""


class Limits(NamedTuple):
    """Lower bounds on a batch's time, in ns.

    Attributes:
        devices, stages, memory, split, micro_batches: the ladder.
        rows: of the plan's micro-batches, on the mean stage and on the busiest, where nothing is recomputed; None where
            replicas run in step.
    """

    devices: int
    stages: int
    memory: int
    split: int
    micro_batches: int
    rows: tuple[int, int] | None = None

    def milliseconds(self) -> dict[str, float]:
        """The ladder by name."""
        return {name: bound / 1e6 for name, bound in zip(self._fields[:5], self[:5], strict=True)}

    def causes(self, plan_ns: int, measured_ns: int | None = None, waited_ns: int = 0) -> str:
        """Where a plan's time goes, in words, with an advice if much of it is lost; arguments are those of `shares`."""
        return described(self.shares(plan_ns, measured_ns, waited_ns), self.within(plan_ns))

    def within(self, plan_ns: int) -> float:
        """The share of its bound by which a plan of these stages may be above the best, at most."""
        return plan_ns / self.split - 1 if self.split else math.inf

    def shares(self, plan_ns: int, measured_ns: int | None = None, waited_ns: int = 0) -> dict[str, float]:
        """Shares of a plan's time: the least that any plan takes (`WORK`), and what the rest is lost to (`CAUSES`).

        They divide all of it; of passes that were faster than predicted they divide the predicted time, of which
        "prediction" is the part that was saved, below 0.

        Args:
            plan_ns: as predicted.
            measured_ns: where the plan was trained: the iteration, and
            waited_ns: its wait for the plan before.
        """
        steps, names = [self.devices, self.stages, self.memory], ["stages", "memory"]
        if self.rows is None:
            names.append("micro-batches")
        else:
            of_rows = (self.rows[0], max(self.rows[1], self.split))
            even, busiest = (min(max(self.memory, rows), self.micro_batches) for rows in of_rows)
            steps, names = [*steps, even, max(even, busiest)], [*names, "rows", "uneven stages", "recomputation"]
        steps, names = [*steps, self.micro_batches, plan_ns], [*names, "order"]
        if measured_ns is not None:
            steps, names = [*steps, measured_ns, measured_ns + waited_ns], [*names, "prediction", "waits"]
        whole = max(steps[-1], plan_ns + waited_ns)
        shares = {WORK: self.devices / whole}
        for name, below, above in zip(names, steps, steps[1:], strict=False):
            shares[name] = (above - below) / whole
        return shares


def described(shares: Mapping[str, float], within: float = math.inf) -> str:
    """Shares of a time as a sentence, with an advice if the largest loss is more than a tenth.

    Args:
        shares: as of `Limits.shares`.
        within: as of `Limits.within`; unknown by default.
    """
    losses = {name: share for name, share in shares.items() if name in CAUSES and round(share, 2) > 0}
    largest_first = sorted(losses, key=lambda name: -losses[name])
    text = f"{shares[WORK]:.0%} of the time is work that no plan can avoid"
    if largest_first:
        largest, *others = largest_first
        lost = [f"{losses[largest]:.0%} is lost to {CAUSES[largest]}"]
        lost += [f"{losses[name]:.0%} to {CAUSES[name]}" for name in others]
        text += f"; {', '.join(lost)}"
    faster = -shares.get("prediction", 0.0)
    if within <= PROVEN:
        text += f"; proven within {max(math.ceil(1000 * within), 1) / 1000:.1%}"
    if round(faster, 2) > 0:
        text = f"as predicted, {text}; passes took {faster:.0%} less"
    if largest_first and losses[largest_first[0]] >= ADVISED:
        text += f". {ADVICE[largest_first[0]]}"
    return text


def limits(planner: Planner, batch: GlobalBatch, plan: IterationPlan) -> Limits:
    """The bounds of a training iteration.

    Args:
        planner: what made the plan: model, layout, memory, costs, what is allowed.
        batch: what was planned.
        plan: its plan.
    """
    work = LeastWork(planner, planner.samples(batch))
    devices = work.everywhere(work.time)
    stages = max(devices, work.best_layer_split(work.time, PRICES[:1]), work.longest_way())
    memory = max(stages, work.best_layer_split(work.fitting_time, PRICES))
    if has_one_stage(planner):
        split = memory = max(memory, work.on_one_stage())
    else:
        split = max(memory, fastest_filling(work))
    divides = planner.settings.effective_split_backward != "off"
    of_plan = max(_of_replica(replica, divides=divides) for replica in plan.replicas)
    return Limits(devices, stages, memory, split, max(split, of_plan), rows_alone(planner, batch, plan))


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
