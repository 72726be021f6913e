"""What no plan of a batch can beat: a ladder of lower bounds, each at least the one before, and what lies between them.

    devices        every sample's least work, over all devices
    stages         the best split of the modules into stages: a stage's least work, and the forward work before it; and
                   the way of the longest sample through all modules and back, which few micro-batches cannot hide
    memory         the same with as much recomputation as memory asks for
    micro_batches  of the plan's own micro-batches: a stage's work, and the least forward work before it; what this is
                   more is lost to rows, uneven stages or recomputation (`choosing.lost_time`)
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

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.choosing.least_costs import INPUT, LeastCosts
from megatron_dynapipe.choosing.lost_time import rows_alone
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import Floats, Quantity
from megatron_dynapipe.core.instructions import Forward, Pass
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.costing.state import ModelState
from megatron_dynapipe.sampling.global_batch import GlobalBatch
from megatron_dynapipe.ways.pieces import can_cut

PRICES = (0.0, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 5.0)
"""Of memory, from none."""
MOST_LENGTHS = 400
"""Different samples that are told apart; of more, lengths are rounded down."""
WORK = "work"
"""The share of the time that every plan of the batch takes, on these devices."""
ADVISED = 0.1
"""A loss of this share of the time comes with an advice."""
_UNKNOWN = 1e30
"""Above any time and any memory: of a sample that does not fit in a mode."""


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
    "waits": "More planner processes would have it ready in time (--dynapipe-planners)",
}
"""What would lose less."""


class Limits(NamedTuple):
    """Lower bounds on a batch's time, in ns.

    Attributes:
        devices, stages, memory, micro_batches: the ladder.
        rows: of the plan's micro-batches, on the mean stage and on the busiest, where nothing is recomputed; None where
            replicas run in step.
    """

    devices: int
    stages: int
    memory: int
    micro_batches: int
    rows: tuple[int, int] | None = None

    def milliseconds(self) -> dict[str, float]:
        """The ladder by name."""
        return {name: bound / 1e6 for name, bound in zip(self._fields[:4], self[:4], strict=True)}

    def causes(self, plan_ns: int, measured_ns: int | None = None, waited_ns: int = 0) -> str:
        """Where a plan's time goes, in words, with an advice if much of it is lost; arguments are those of `shares`."""
        return described(self.shares(plan_ns, measured_ns, waited_ns))

    def shares(self, plan_ns: int, measured_ns: int | None = None, waited_ns: int = 0) -> dict[str, float]:
        """Shares of a plan's time: the least that any plan takes (`WORK`), and what the rest is lost to (`CAUSES`).

        Args:
            plan_ns: as predicted.
            measured_ns: where the plan was trained: the iteration, and
            waited_ns: its wait for the plan before.
        """
        steps, names = [self.devices, self.stages, self.memory], ["stages", "memory"]
        if self.rows is None:
            names.append("micro-batches")
        else:
            even, busiest = (min(max(self.memory, rows), self.micro_batches) for rows in self.rows)
            steps, names = [*steps, even, max(even, busiest)], [*names, "rows", "uneven stages", "recomputation"]
        steps, names = [*steps, self.micro_batches, plan_ns], [*names, "order"]
        if measured_ns is not None:
            steps, names = [*steps, measured_ns, measured_ns + waited_ns], [*names, "prediction", "waits"]
        whole = steps[-1]
        shares = {WORK: self.devices / whole}
        for name, below, above in zip(names, steps, steps[1:], strict=False):
            shares[name] = (above - below) / whole
        return shares


def described(shares: Mapping[str, float]) -> str:
    """Shares of a time as a sentence, with an advice if the largest loss is more than a tenth."""
    losses = {name: share for name, share in shares.items() if name in CAUSES and round(share, 2) > 0}
    largest_first = sorted(losses, key=lambda name: -losses[name])
    text = f"{shares[WORK]:.0%} of the time is work that no plan can avoid"
    if largest_first:
        largest, *others = largest_first
        lost = [f"{losses[largest]:.0%} is lost to {CAUSES[largest]}"]
        lost += [f"{losses[name]:.0%} to {CAUSES[name]}" for name in others]
        text += f"; {', '.join(lost)}"
    faster = -shares.get("prediction", 0.0)
    if round(faster, 2) > 0:
        text += f"; passes took {faster:.0%} less than predicted"
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
    work = _LeastWork(planner, planner.samples(batch))
    devices = work.everywhere(work.time)
    stages = max(devices, work.best_layer_split(work.time, PRICES[:1]), work.longest_way())
    memory = max(stages, work.best_layer_split(work.fitting_time, PRICES))
    divides = planner.settings.effective_split_backward != "off"
    of_plan = max(_of_replica(replica, divides=divides) for replica in plan.replicas)
    return Limits(devices, stages, memory, max(memory, of_plan), rows_alone(planner, batch, plan))


class _LeastWork:
    """Least times and bytes of modules.

    Attributes:
        time, stored: a sample's share of a module of each kind, `[modes, samples, kinds]`.
        fitting_time: the same of micro-batches that fit all stages' memory.
        round_trip: forward and input-gradient time of a whole micro-batch that holds it, `[samples, kinds]`.
        forward: forward time of any micro-batch, `[kinds]`.
    """

    def __init__(self, planner: Planner, samples: Samples) -> None:
        s = planner.settings
        self.layout, self.stages, self.replicas = planner.layout, planner.layout.stages, s.data_parallel
        self.limit, self.divides = s.memory_limit_bytes, s.effective_split_backward != "off"
        inputs, targets, self.counts = _different(samples)
        cut = s.may_cut and can_cut(planner.problem(samples))
        modes = [LeastCosts(tables) for tables in planner.tables]
        self.time: Floats = np.stack([mode.times(inputs, targets, cut=cut) for mode in modes])
        self.stored: Floats = np.stack([mode.share(Quantity.STORED, inputs, targets) for mode in modes])
        shortest = (np.ones(1, np.int64), np.zeros(1, np.int64)) if cut else (inputs, targets)
        forward = np.min([mode.whole(Quantity.FORWARD, *shortest) for mode in modes], axis=0)
        backward = np.min([mode.whole(INPUT, *shortest) for mode in modes], axis=0)
        self.round_trip: Floats = np.broadcast_to(forward + backward, (len(inputs), forward.shape[1]))
        self.forward: Floats = np.asarray(forward.min(axis=0), np.float64)
        self.backward: Floats = np.asarray(backward.min(axis=0), np.float64)
        self.has_halves = all(tables.division is not None for tables in planner.tables)
        kinds = planner.tables[0].kinds
        self.modules = np.array([kinds.index(kind) for kind in self.layout.modules])
        self.state = np.zeros(len(self.modules) + 1)
        if s.model_state_bytes is None:
            self.state[1:] = self._state(planner.tables[0].state, s.distributed_optimizer)
        room = self.stages * self.limit - float(self.state[-1])
        least = float(np.min([mode.stored_by_position() for mode in modes], axis=0)[self.modules].sum())
        most = room / least if least > 0 else np.inf
        fitting = [mode.times(inputs, targets, cut=cut, most=most) for mode in modes]
        self.fitting_time: Floats = np.stack(fitting)
        if samples.labels is not None:  # the last MLP and the head, which run over labels alone, are left out
            self.modules[-2:] = len(kinds)
            self.time, self.stored = _with_free_kind(self.time), _with_free_kind(self.stored)
            self.fitting_time = _with_free_kind(self.fitting_time)
            self.forward, self.backward = _with_free_kind(self.forward), _with_free_kind(self.backward)
            self.round_trip = _with_free_kind(self.round_trip)
        self.rounding = len(self.modules) * int(self.counts.sum()) / self.replicas  # of times to whole ns

    def _state(self, state: ModelState, sharded: bool) -> Floats:
        """Bytes of model state of the first modules, experts left out, with the embedding."""
        parameters = np.array([state.modules.get(kind, 0) for kind in self.layout.modules], np.float64)
        parameters[[kind == state.expert_kind for kind in self.layout.modules]] -= state.expert_bytes
        parameters[0] += state.embedding_bytes
        times = (2 + state.gradient_bytes) / 2 + 6 / (self.replicas if sharded else 1)
        return np.asarray(np.cumsum(parameters) * times)

    def everywhere(self, times: Floats) -> int:
        """All work, over all devices."""
        each = times.min(axis=0)[:, self.modules].sum(axis=1)
        total = float(each @ self.counts) / self.replicas - self.rounding
        return int(max(total / self.stages, 0)) if np.isfinite(total) else 0

    def longest_way(self) -> int:
        """The forward and input-gradient passes of a sample through all modules, one after another, of the longest."""
        longest = float(self.round_trip[:, self.modules].sum(axis=1).max())
        return int(max(longest - len(self.modules), 0)) if longest < _UNKNOWN else 0

    def best_layer_split(self, times: Floats, prices: tuple[float, ...]) -> int:
        """The least time of the busiest stage, with its fill before it, over all splits."""
        count = len(self.modules)
        step = 1 if self.has_halves else self.layout.model.modules_per_layer
        ends = [*range(0, count - 1, step), count]  # the head stays with the last module
        before, back = (
            np.concatenate([[0.0], np.cumsum(times[self.modules])]) for times in (self.forward, self.backward)
        )
        if self.layout.chunks > 1:  # a device's chunks may be any modules; its first one has so many before it
            fill = sum(before[ends[min(device, len(ends) - 1)]] for device in range(self.stages)) / self.stages
            return self.everywhere(times) + int(fill)
        bound = np.full((len(ends), len(ends)), np.inf)
        for first, row in zip(
            range(len(ends) - 1),
            self._segments(times, ends, before, before * 0 if self.divides else back, prices),
            strict=True,
        ):
            bound[first, first + 1 :] = row
        np.fill_diagonal(bound, 0.0)  # a stage may be empty
        best = bound[0]
        for _ in range(self.stages - 1):
            best = np.maximum(best[:, None], bound).min(axis=0)
        return int(max(best[-1] - self.rounding, 0)) if best[-1] < _UNKNOWN else 0

    def _segments(
        self, times: Floats, ends: list[int], before: Floats, back: Floats, prices: tuple[float, ...]
    ) -> Iterator[Floats]:
        """For each first module in turn, the bounds of stages from there to every later end."""
        one_hot = np.eye(self.time.shape[2])[self.modules]
        upto = np.concatenate([np.zeros((1, one_hot.shape[1])), np.cumsum(one_hot, axis=0)])
        state = self.state
        times, held = (np.minimum(of, _UNKNOWN) for of in (times, self.stored))  # infinity · 0 modules is no number
        for at, first in enumerate(ends[:-1]):
            counts = upto[ends[at + 1 :]] - upto[first]  # [ends, kinds]
            time, stored = times @ counts.T, held @ counts.T  # [modes, samples, ends]
            rest = upto[-1] - upto[ends[at + 1 :]]
            round_trips = self.round_trip @ rest.T
            room = np.maximum(self.limit - (state[ends[at + 1 :]] - state[first]), 1.0)
            around = before[first] + back[first]
            bounds = [
                (around + (time + (price / room) * stored * round_trips).min(axis=0).T @ self.counts / self.replicas)
                / (1 + price)
                for price in prices
            ]
            yield np.max(bounds, axis=0)


def _with_free_kind(costs: Floats) -> Floats:
    """Costs of one kind more, which takes nothing: `[…, kinds + 1]`."""
    return np.concatenate([costs, np.zeros_like(costs[..., :1])], axis=-1)


def _different(samples: Samples) -> tuple[IntArray, IntArray, IntArray]:
    """Positions of inputs and targets that occur, rounded down where they are many, and how often each does."""
    pairs, step = np.stack([samples.input_positions, samples.target_positions]), 1
    while True:
        rounded = np.where(pairs > step, pairs // step * step, np.minimum(pairs, 1))
        lengths, counts = np.unique(rounded, axis=1, return_counts=True)
        if lengths.shape[1] <= MOST_LENGTHS:
            return lengths[0], lengths[1], counts
        step *= 2


def _of_replica(replica: ReplicaPlan, *, divides: bool) -> int:
    """A stage's work and the least forward work before it, of the micro-batches that a replica runs."""
    forward = np.zeros((len(replica.micro_batches), len(replica.stages)), np.int64)
    backward, work = np.zeros_like(forward), np.zeros(len(replica.stages), np.int64)
    for stage, plan in enumerate(replica.stages):
        for event in plan.predicted:
            step, time = event.instruction, event.end_ns - event.start_ns
            work[stage] += time
            if isinstance(step, Pass) and step.chunk == 0:
                (forward if isinstance(step, Forward) else backward)[step.micro_batch, stage] += time
    if not len(forward):
        return 0
    around = forward if divides else forward + backward
    return max(int(around[:, :stage].sum(axis=1).min() + work[stage]) for stage in range(len(work)))
