"""One global batch → one verified iteration plan: a pure function of lengths, settings and tables of costs.

GlobalBatch ── lengths ──► Samples, BatchProblem ── ways ──► candidates ── best ──► ScheduledBatch
  ── lower ──► IterationPlan ── verify ──► the same, verified
"""

import copy
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np

from megatron_dynapipe.core.batch import GlobalBatch, Samples, explain_infeasible
from megatron_dynapipe.core.costs import LARGEST_COORDINATE, CostTables
from megatron_dynapipe.core.errors import InfeasibleError, PlanningError
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.model import boundary_shapes, boundary_tensors
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.network import Links, TransferRules
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan, StagePlan
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.scheduling import ScheduledBatch
from megatron_dynapipe.core.search import notice
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import in_mb
from megatron_dynapipe.core.verify import PlanRules, verify
from megatron_dynapipe.core.ways import Way, best


class Planner:
    """Plans iterations of one run; `choosing.planners.planner_of` makes one of a cost model.

    Args:
        settings: model, layout, memory, choices.
        tables: modules' costs under every recompute mode of the settings.
        links: what messages between virtual stages take.
        model_state_bytes: int64[stages], memory of parameters, gradients and optimizer states.
        ways: to make micro-batches: those that are tried together, and those to try where these find nothing.
        rules: what plans of these ways have to hold.
        costs_digest: digest of what the tables were made from; a part of every plan's identity.

    Raises:
        InfeasibleError: a stage's model state alone exceeds the memory limit.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        *,
        tables: Sequence[CostTables],
        links: Links,
        model_state_bytes: IntArray,
        ways: Sequence[Sequence[Way]],
        rules: PlanRules,
        costs_digest: str,
    ) -> None:
        self.settings = settings
        self.tables = tuple(tables)
        self.ways = ways
        self.rules = rules
        self.costs_digest = costs_digest
        self.layout = settings.layout
        self.links = links
        self._peak_covers_backward = any(tables.peak_covers_backward for tables in self.tables)
        self.model_state_bytes = model_state_bytes
        if self.model_state_bytes.max() >= settings.memory_limit_bytes:
            stage = int(self.model_state_bytes.argmax())
            needed, available = in_mb(int(self.model_state_bytes[stage]), settings.memory_limit_bytes)
            raise InfeasibleError(
                f"stage {stage} needs {needed} for parameters, gradients and optimizer state, of {available}",
                hint="use more pipeline stages or tensor parallelism, or the distributed optimizer",
            )

    @property
    def digest(self) -> str:
        """Of settings and costs."""
        return hashlib.blake2b(msgspec.json.encode([self.settings, self.costs_digest]), digest_size=16).hexdigest()

    def under(self, rules: TransferRules) -> "Planner":
        """A planner under these rules of transfers; this one where its settings have rules of their own."""
        is_given = not self.settings.transfers.are_plain or rules == self.settings.transfers
        return self if is_given else self.changed(transfers=rules)

    def changed(self, **changes: object) -> "Planner":
        """A planner of other settings that leave costs, ways and state as they are."""
        other = copy.copy(self)
        other.settings = msgspec.structs.replace(self.settings, **changes)
        return other

    def plan(self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """The plan of one iteration.

        Args:
            batch: samples with their lengths in tokens.
            iteration: its number, for the record; nothing else depends on it.
            forward_only: plan an evaluation: no backward passes.

        Raises:
            PlanningError: no sample.
            InfeasibleError: some sample does not fit; the message names it, the stage and the memory.
        """
        return self.plan_timed(batch, iteration, forward_only=forward_only)[0]

    def plan_timed(
        self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False
    ) -> tuple[IterationPlan, dict[str, float]]:
        """`plan`, with the seconds spent in "ordering", "partition", "schedule", "lowering" and "verify"."""
        seconds: dict[str, float] = {}
        held, scheduled = self.scheduled(batch, forward_only=forward_only, seconds=seconds)
        with timed(seconds, "lowering"):
            plan = IterationPlan(
                iteration=iteration,
                family=self.settings.model.family,
                forward_only=forward_only,
                settings_digest=self.digest,
                pipeline_stages=self.layout.stages,
                chunks=self.layout.chunks,
                memory_limit_bytes=self.settings.memory_limit_bytes,
                model_state_bytes=tuple(self.model_state_bytes.tolist()),
                peak_covers_backward=self._peak_covers_backward,
                batch_layouts=self.settings.micro_batch_layouts,
                in_step=self.settings.replicas_in_step,
                replicas=replica_plans(self.settings, held, scheduled),
            )
        with timed(seconds, "verify"):
            verify(
                plan,
                rules=self.rules,
                expected_samples=batch.sample_ids.tolist(),
                fast_verify=fast_verify,
                ordered_starts=self.settings.transfers.ordered_starts,
                element_bytes=self.settings.element_bytes,
            )
        return plan, seconds

    def scheduled(
        self, batch: GlobalBatch, *, forward_only: bool, seconds: dict[str, float]
    ) -> tuple[Samples, ScheduledBatch]:
        """What micro-batches hold, whole samples or pieces, and these with the order of their passes; times `seconds`.

        Raises:
            PlanningError, InfeasibleError: as `plan`.
        """
        with timed(seconds, "ordering"):
            samples = self.samples(batch)
            problem = self.problem(samples, forward_only=forward_only)
            group = self.settings.replicas_in_step
            busy = min(problem.replicas // group, -(-len(samples.ids) // group))  # the other replicas are idle
        unfit: InfeasibleError | None = None
        for ways in self.ways:
            with timed(seconds, "partition"):
                planned = replace(problem, replicas=busy)
                candidates = [candidate for way in ways for candidate in way.candidates(samples, planned)]
            with timed(seconds, "schedule"):
                if (found := best(candidates, self.settings.schedule)) is not None:
                    candidate, scheduled = found
                    return candidate.spread(scheduled) if candidate.spread else (candidate.samples, scheduled)
            for candidate in candidates:
                if candidate.missed:
                    notice(candidate.missed)
                unfit = candidate.unfit() or unfit
        raise unfit or explain_infeasible(samples, problem)

    def samples(self, batch: GlobalBatch) -> Samples:
        """The batch's lengths in padded positions.

        Raises:
            PlanningError: no sample, or one of more than 2^20 positions.
            DataError: a sample is empty, or longer than what it is to be padded to.
        """
        if not len(batch):
            raise PlanningError("expected at least one sample in a global batch, got none", hint="use larger batches")
        samples = Samples.of(batch, self.settings.model.family, self.settings.length_multiple)
        if (longest := max(int(samples.inputs.max()), int(samples.targets.max()))) > LARGEST_COORDINATE:
            raise PlanningError(
                f"expected samples of at most {LARGEST_COORDINATE} positions (2^20), got {longest}",
                hint="truncate them: --max-seq-len, in training --seq-length",
            )
        if self.settings.partition is None:
            return samples
        return replace(self.settings.partition.pad(samples), labels=None)  # others run all positions

    def problem(self, samples: Samples, *, forward_only: bool = False) -> BatchProblem:
        """The problem to partition and schedule."""
        s = self.settings
        return BatchProblem(
            inputs=samples.inputs,
            targets=samples.targets,
            input_positions=samples.input_positions,
            target_positions=samples.target_positions,
            labels=samples.labels,
            label_experts=s.label_experts,
            length_multiple=s.length_multiple,
            batch_layouts=s.micro_batch_layouts,
            modes=self.tables,
            layout=self.layout,
            model_state_bytes=self.model_state_bytes,
            memory_limit_bytes=s.memory_limit_bytes,
            in_flight=self.in_flight_options(),
            replicas=s.data_parallel,
            links=self.links,
            bytes_per_position=s.sent_per_position,
            held_per_position=s.held_per_position,
            forward_only=forward_only,
            peak_covers_backward=self._peak_covers_backward,
            transfers=s.transfers,
            split_backward="off" if forward_only else s.effective_split_backward,
            corrections=s.corrections,
            precedents=s.precedents if s.searches and not forward_only else (),
        )

    def in_flight_options(self) -> IntArray:
        """How many micro-batches each stage is to have memory for: a full pipeline's number, half of it, one."""
        full = np.arange(self.layout.stages, 0, -1) * self.layout.chunks
        most = sorted({int(full[0]), -(-int(full[0]) // 2), 1}, reverse=True)
        return np.asarray(np.minimum(full, np.array(most)[:, None]))


def replica_plans(settings: PlannerSettings, samples: Samples, scheduled: ScheduledBatch) -> tuple[ReplicaPlan, ...]:
    """The plan of every replica; its messages are not verified yet. Replicas that got no sample come last.

    Args:
        settings: the run's.
        samples: what micro-batches hold, whole samples and pieces.
        scheduled: micro-batches and the order of their passes.
    """
    layout = settings.layout
    plans = []
    for number, (rows, schedule) in enumerate(zip(scheduled.replicas, scheduled.schedules, strict=True)):
        topology = PipelineTopology(
            stages=layout.stages,
            chunks=layout.chunks,
            shapes=boundary_shapes(
                boundary_tensors(layout),
                [scheduled.shapes[row] for row in rows],
                hidden_size=settings.hidden_size,
                sequence_parallel=settings.tensor_parallel if settings.sequence_parallel else 1,
            ),
            forward_only=scheduled.costs.forward_only,
            receive_ahead=scheduled.costs.transfers.receive_ahead,
        )
        lists = lower(schedule.order, topology)
        plans.append(
            ReplicaPlan(
                micro_batches=tuple(_micro_batch(settings, samples, scheduled, int(row), number) for row in rows),
                stages=tuple(
                    StagePlan(stage=stage, instructions=instructions, predicted=schedule.timeline[stage])
                    for stage, instructions in enumerate(lists)
                ),
                predicted_ns=schedule.makespan_ns,
            )
        )
    stages = tuple(StagePlan(stage=stage, instructions=(), predicted=()) for stage in range(layout.stages))
    idle = ReplicaPlan(micro_batches=(), stages=stages, predicted_ns=0)
    return (*plans, *[idle] * (settings.data_parallel - len(plans)))


def _micro_batch(
    settings: PlannerSettings, samples: Samples, scheduled: ScheduledBatch, row: int, replica: int
) -> MicroBatch:
    members = scheduled.members[row]
    ranks = samples.team_of(members)
    return MicroBatch(
        sample_ids=tuple(samples.ids[members].tolist()),
        input_lengths=tuple(samples.input_tokens[members].tolist()),
        target_lengths=tuple(samples.target_tokens[members].tolist()),
        shape=scheduled.shapes[row],
        layout=scheduled.batch_layouts[row],
        recompute=tuple(settings.recompute[mode] for mode in scheduled.modes[row].tolist()),
        stored_bytes=tuple(scheduled.costs.stored_bytes[row].tolist()),
        peak_bytes=tuple(scheduled.costs.peak_bytes[row].tolist()),
        pieces=samples.pieces_of(members),
        labels=() if samples.labels is None else tuple(samples.labels[members].tolist()),
        share=(ranks, replica % ranks),
    )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's wall-clock time to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
