"""One global batch → one verified iteration plan: a pure function of lengths, settings and cost model.

order ── cut into micro-batches ── deal to replicas ── schedule passes ── lower to instructions ── verify
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_dynapipe.cost import CostModel, LayerTables, boundary_bytes, stage_costs
from megatron_dynapipe.errors import CostModelError, InfeasibleError, PlanningError
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch, ReplicaPlan, StagePlan
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning.balance import deal
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, baseline_cuts
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors
from megatron_dynapipe.planning.intervals import CutProblem
from megatron_dynapipe.planning.lowering import Pipeline, lower
from megatron_dynapipe.planning.ordering import sweeps
from megatron_dynapipe.planning.partition import Cut, cut
from megatron_dynapipe.planning.problem import IntArray, PipelineProblem
from megatron_dynapipe.planning.prove import prove
from megatron_dynapipe.planning.samples import BoolArray, Samples, explain_infeasible, fits_alone
from megatron_dynapipe.planning.schedules import Schedule, ScheduleSettings, predict, schedule
from megatron_dynapipe.planning.schedules.one_f_one_b import one_f_one_b_within_memory
from megatron_dynapipe.planning.search import default_evaluations, search
from megatron_dynapipe.planning.search_problem import SearchProblem
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import Shape, in_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Micro-batches of one way to cut the batch, dealt to replicas and scheduled."""

    members: list[IntArray]
    shapes: list[Shape]
    modes: IntArray
    problem: PipelineProblem
    replicas: list[IntArray]
    schedules: list[Schedule]

    @property
    def makespan_ns(self) -> int:
        return max(schedule.makespan_ns for schedule in self.schedules)


class Planner:
    """Plans iterations of one run.

    Args:
        settings: model, layout, memory, choices.
        cost_model: what layers cost.

    Raises:
        CostModelError: the cost model is of another kind of model, or lacks a table that the settings ask for.
        InfeasibleError: a stage's model state alone exceeds the memory limit.
    """

    def __init__(self, settings: PlannerSettings, cost_model: CostModel) -> None:
        if cost_model.family is not settings.family:
            raise CostModelError(
                f"expected a cost model of a {settings.family} model, got {cost_model.name} of a {cost_model.family}"
            )
        self.settings = settings
        self.cost_model = cost_model
        self.layout = settings.layout
        self._links = settings.links
        self._tables: list[LayerTables] = [
            cost_model.tables(tensor_parallel=settings.tensor_parallel, recompute=mode) for mode in settings.recompute
        ]
        self._peak_covers_backward = any(tables.peak_covers_backward for tables in self._tables)
        states = np.stack([self._model_state(tables) for tables in self._tables])
        self.model_state_bytes: IntArray = states.max(axis=0)
        self._memory_bytes: IntArray = np.asarray(settings.memory_limit_bytes - self.model_state_bytes)
        if self._memory_bytes.min() <= 0:
            stage = int(self._memory_bytes.argmin())
            needed, available = in_mb(int(self.model_state_bytes[stage]), settings.memory_limit_bytes)
            raise InfeasibleError(
                f"stage {stage} needs {needed} for parameters, gradients and optimizer state, of {available}",
                hint="use more pipeline stages or tensor parallelism, or the distributed optimizer",
            )
        identity = msgspec.json.encode([settings, cost_model.digest])
        self.digest = hashlib.blake2b(identity, digest_size=16).hexdigest()
        self._boundaries = BoundarySettings(
            tensors=boundary_tensors(
                settings.family, self.layout.layers_per_stage, encoder_layers=settings.encoder_layers
            ),
            hidden_size=settings.hidden_size,
            sequence_parallel=settings.tensor_parallel if settings.sequence_parallel else 1,
        )

    def plan(self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """The plan of one iteration.

        Args:
            batch: samples with their lengths in tokens.
            iteration: its number, for the record; nothing else depends on it.
            forward_only: plan an evaluation: no backward passes.

        Raises:
            PlanningError: no sample, or fewer than replicas.
            InfeasibleError: some sample does not fit; the message names it, the stage and the memory.
        """
        return self.plan_timed(batch, iteration, forward_only=forward_only)[0]

    def plan_timed(
        self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False
    ) -> tuple[IterationPlan, dict[str, float]]:
        """`plan`, with the seconds spent in "ordering", "partition", "schedule", "lowering" and "verify"."""
        seconds: dict[str, float] = {}
        if len(batch) < self.settings.data_parallel:
            raise PlanningError(
                f"expected at least one sample for each of {self.settings.data_parallel} replicas, got {len(batch)}",
                hint="use larger global batches or fewer data-parallel replicas",
            )
        with _timed(seconds, "ordering"):
            samples = Samples.of(batch, self.settings.family)
            if self.settings.partition.algorithm is PartitionAlgorithm.PADDING:
                samples = samples.padded(
                    self.settings.partition.padded_input_length, self.settings.partition.padded_target_length
                )
            orders = sweeps(samples.inputs, samples.targets)
        with _timed(seconds, "partition"):
            order, cuts = self._cuts(samples, orders, forward_only)
        with _timed(seconds, "schedule"):
            best = self._best(samples, order, cuts, forward_only)
        if best is None:
            raise explain_infeasible(
                samples, self.cut_problem(samples, self._one_in_flight(), forward_only=forward_only)
            )
        with _timed(seconds, "lowering"):
            plan = self._lower(samples, best, iteration, forward_only)
        with _timed(seconds, "verify"):
            verify(plan, expected_samples=samples.ids.tolist(), prove=prove)
        return plan, seconds

    def fits_alone(self, samples: Samples) -> BoolArray:
        """Whether each sample fits as a micro-batch of its own, alone in flight: bool[samples]."""
        return fits_alone(self.cut_problem(samples, self._one_in_flight()))

    def _model_state(self, tables: LayerTables) -> IntArray:
        if self.settings.model_state_bytes is not None:
            return np.array(self.settings.model_state_bytes, np.int64)
        return self.layout.model_state_bytes(
            tables.state,
            data_parallel=self.settings.data_parallel,
            distributed_optimizer=self.settings.distributed_optimizer,
        )

    def in_flight_options(self) -> IntArray:
        """How many micro-batches each rank is to have memory for: a full pipeline's number, half of it, one."""
        full = np.arange(self.layout.stages, 0, -1) * self.layout.chunks
        most = sorted({int(full[0]), -(-int(full[0]) // 2), 1}, reverse=True)
        return np.asarray(np.minimum(full, np.array(most)[:, None]))

    def _one_in_flight(self) -> IntArray:
        return np.ones((1, self.layout.stages), np.int64)

    def _cuts(self, samples: Samples, orders: list[IntArray], forward_only: bool) -> tuple[IntArray, list[Cut]]:
        """An order of the samples, and the ways to cut it that are to be scheduled."""
        partition = self.settings.partition
        if partition.algorithm is PartitionAlgorithm.DP:
            problem = self.cut_problem(samples, self.in_flight_options(), forward_only=forward_only)
            found = cut(problem, orders, refine=len(orders) > 1)
            return found.order, [each for each in found.cuts if each is not None]
        problem = self.cut_problem(samples, self._one_in_flight(), forward_only=forward_only)
        return orders[0], baseline_cuts(problem.reordered(orders[0]), partition)

    def cut_problem(self, samples: Samples, in_flight: IntArray, *, forward_only: bool = False) -> CutProblem:
        """How samples are to be cut, for the given options `[options, ranks]` of micro-batches in flight."""
        return CutProblem(
            inputs=samples.inputs,
            targets=samples.targets,
            modes=tuple(self._tables),
            layout=self.layout,
            memory_bytes=self._memory_bytes,
            in_flight=in_flight,
            replicas=self.settings.data_parallel,
            forward_only=forward_only,
        )

    def _best(self, samples: Samples, order: IntArray, cuts: list[Cut], forward_only: bool) -> _Candidate | None:
        """The fastest candidate that fits: searched for, or the best of the cuts as they are."""
        chosen = self.settings.schedule
        searchable = self.settings.partition.algorithm is PartitionAlgorithm.DP  # a search would change the cut
        candidates = []
        if searchable and chosen.method == "adaptive":
            searched = self._searched(samples, order, cuts, forward_only)
            if searched is not None:
                candidates.append(searched)
                if self.layout.chunks == 1 and not self._peak_covers_backward:
                    return searched
                # Here list scheduling may refuse a forward that 1F1B has memory for; else 1F1B is in the search.
                chosen = replace(chosen, method="1f1b")
        for found in cuts:
            with suppress(InfeasibleError):
                candidates.append(self._candidate(samples, order, found, chosen, forward_only))
        return min(candidates, key=lambda candidate: candidate.makespan_ns, default=None)

    def _searched(self, samples: Samples, order: IntArray, cuts: list[Cut], forward_only: bool) -> _Candidate | None:
        """The best solution of the order search, or None where it finds none within the memory."""
        s = self.settings
        problem = SearchProblem(
            inputs=samples.inputs[order],
            targets=samples.targets[order],
            modes=self._tables,
            layout=self.layout,
            model_state_bytes=self.model_state_bytes,
            memory_limit_bytes=s.memory_limit_bytes,
            replicas=s.data_parallel,
            links=self._links,
            bytes_per_position=s.hidden_size * s.element_bytes,
            forward_only=forward_only,
            peak_covers_backward=self._peak_covers_backward,
        )
        enough = [cut for cut in cuts if len(cut.sizes) >= s.data_parallel]  # every replica gets a micro-batch
        evaluations = s.schedule.search_evaluations
        if evaluations is None:
            evaluations = default_evaluations(enough, replicas=s.data_parallel, chunks=self.layout.chunks)
        replicas = search(problem, enough, evaluations=evaluations, seed=s.schedule.seed)
        if not replicas:
            return None
        members = [order[first : first + size] for r in replicas for first, size in zip(r.firsts, r.sizes, strict=True)]
        shapes = [samples.shape(rows) for rows in members]
        modes = np.concatenate([r.modes for r in replicas])
        costs = self.pipeline_problem(shapes, modes, forward_only=forward_only)
        rows = np.split(np.arange(len(members)), np.cumsum([len(r.sizes) for r in replicas])[:-1])
        return _Candidate(
            members=members,
            shapes=shapes,
            modes=modes,
            problem=costs,
            replicas=rows,
            schedules=[
                predict(one, replica.order, one_f_one_b_within_memory(one))
                for one, replica in zip(map(costs.take, rows), replicas, strict=True)
            ],
        )

    def _candidate(
        self, samples: Samples, order: IntArray, found: Cut, chosen: ScheduleSettings, forward_only: bool
    ) -> _Candidate:
        members, modes = [*np.split(order, np.cumsum(found.sizes)[:-1])], found.modes
        while len(members) < self.settings.data_parallel:  # Every replica gets one: halve the largest.
            largest = int(np.argmax([len(rows) for rows in members]))
            half = len(members[largest]) // 2
            members[largest : largest + 1] = [members[largest][:half], members[largest][half:]]
            modes = np.insert(modes, largest, modes[largest])
        shapes = [samples.shape(rows) for rows in members]
        problem = self.pipeline_problem(shapes, modes, forward_only=forward_only)
        replicas = deal(rank_times_of(problem), self.settings.data_parallel)
        schedules = [schedule(problem.take(rows), chosen) for rows in replicas]
        return _Candidate(
            members=members, shapes=shapes, modes=modes, problem=problem, replicas=replicas, schedules=schedules
        )

    def pipeline_problem(self, shapes: list[Shape], modes: IntArray, *, forward_only: bool = False) -> PipelineProblem:
        """Costs of the micro-batches on every virtual stage."""
        s = self.settings
        sizes, inputs, targets = np.array(shapes, np.int64).T
        rows = np.zeros((4, len(shapes), self.layout.virtual_stages), np.int64)
        for mode, tables in enumerate(self._tables):
            chosen = modes == mode
            if chosen.any():
                costs = stage_costs(tables, self.layout, sizes[chosen], inputs[chosen], targets[chosen])
                assert costs.feasible.all()
                rows[:, chosen] = costs.forward_ns, costs.backward_ns, costs.stored_bytes, costs.peak_bytes
        activations, gradients = boundary_bytes(self.layout, s.hidden_size, sizes, inputs, targets, s.element_bytes)
        downstream, upstream = map(self._links.transfer_ns, (activations, gradients))
        return PipelineProblem(
            stages=self.layout.stages,
            chunks=self.layout.chunks,
            forward_ns=rows[0],
            backward_ns=rows[1],
            stored_bytes=rows[2],
            peak_bytes=rows[3],
            forward_transfer_ns=np.pad(downstream, ((0, 0), (0, 1))),
            backward_transfer_ns=np.pad(upstream, ((0, 0), (1, 0))),
            model_state_bytes=self.model_state_bytes,
            memory_limit_bytes=s.memory_limit_bytes,
            forward_only=forward_only,
            peak_covers_backward=self._peak_covers_backward,
        )

    def _lower(self, samples: Samples, best: _Candidate, iteration: int, forward_only: bool) -> IterationPlan:
        replicas = []
        for rows, scheduled in zip(best.replicas, best.schedules, strict=True):
            shapes = [best.shapes[row] for row in rows]
            pipeline = Pipeline(
                stages=self.layout.stages,
                chunks=self.layout.chunks,
                shapes=self._boundaries.shapes(shapes),
                forward_only=forward_only,
            )
            lists = lower(scheduled.order, pipeline)
            replicas.append(
                ReplicaPlan(
                    micro_batches=tuple(self._micro_batch(samples, best, int(row)) for row in rows),
                    stages=tuple(
                        StagePlan(stage=stage, instructions=instructions, predicted=scheduled.timeline[stage])
                        for stage, instructions in enumerate(lists)
                    ),
                    predicted_ns=scheduled.makespan_ns,
                )
            )
        return IterationPlan(
            iteration=iteration,
            family=self.settings.family,
            forward_only=forward_only,
            settings_digest=self.digest,
            pipeline_stages=self.layout.stages,
            chunks=self.layout.chunks,
            memory_limit_bytes=self.settings.memory_limit_bytes,
            model_state_bytes=tuple(self.model_state_bytes.tolist()),
            peak_covers_backward=self._peak_covers_backward,
            replicas=tuple(replicas),
        )

    def _micro_batch(self, samples: Samples, best: _Candidate, row: int) -> MicroBatch:
        members = best.members[row]
        return MicroBatch(
            sample_ids=tuple(samples.ids[members].tolist()),
            input_lengths=tuple(samples.input_tokens[members].tolist()),
            target_lengths=tuple(samples.target_tokens[members].tolist()),
            shape=best.shapes[row],
            recompute=self.settings.recompute[int(best.modes[row])],
            stored_bytes=tuple(best.problem.stored_bytes[row].tolist()),
            peak_bytes=tuple(best.problem.peak_bytes[row].tolist()),
        )


def rank_times_of(problem: PipelineProblem) -> IntArray:
    """Forward and backward time of each micro-batch per rank: int64 `[micro-batches, ranks]`."""
    both = problem.forward_ns if problem.forward_only else problem.forward_ns + problem.backward_ns
    return np.asarray(both.reshape(len(both), problem.chunks, problem.stages).sum(axis=1))


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's wall-clock time to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
