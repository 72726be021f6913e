"""One global batch → one verified iteration plan: a pure function of lengths, settings and cost model.

GlobalBatch ── lengths ──► Samples ── order ──► candidate orders
  ── partition ──► OrderedPartitions ── schedule ──► ScheduledBatch
  ── lower ──► IterationPlan ── verify ──► the same, verified
"""

import hashlib
from dataclasses import replace

import msgspec
import numpy as np

from megatron_dynapipe.cost.model import CostModel
from megatron_dynapipe.cost.tables import CostTables
from megatron_dynapipe.errors import CostModelError, InfeasibleError, PlanningError, StallError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.transfer_rules import TransferRules
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning.assembly import replica_plans
from megatron_dynapipe.planning.lockstep import Lockstep
from megatron_dynapipe.planning.native import FEW_ROWS, NEVER, fast_verify
from megatron_dynapipe.planning.partition import OrderedPartitions, candidate_orders, partition
from megatron_dynapipe.planning.pieces import LEAST_GAIN, MARGIN_OF_FEW, CutBatch, can_cut, cut_batch, piece_limits
from megatron_dynapipe.planning.problem import BatchProblem, BoolArray, IntArray
from megatron_dynapipe.planning.samples import Samples, explain_infeasible, fits_alone
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.scheduling import ScheduledBatch, schedule_batch
from megatron_dynapipe.planning.search import begin, notice
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.planning.stopwatch import timed
from megatron_dynapipe.sampling.global_batch import GlobalBatch
from megatron_dynapipe.units import LENGTH_MULTIPLE, BatchLayout, in_mb


class Planner:
    """Plans iterations of one run.

    Args:
        settings: model, layout, memory, choices.
        cost_model: what layers cost.

    Raises:
        CostModelError: the cost model is of another kind of model or another hidden size, or lacks a table that the
            settings ask for.
        InfeasibleError: a stage's model state alone exceeds the memory limit.
    """

    def __init__(self, settings: PlannerSettings, cost_model: CostModel) -> None:
        if cost_model.family is not settings.family:
            raise CostModelError(
                f"expected a cost model of a {settings.family} model, got {cost_model.name} of a {cost_model.family}"
            )
        if cost_model.hidden_size not in (None, settings.hidden_size):
            raise CostModelError(
                f"expected costs of a model of hidden size {settings.hidden_size}, {cost_model.name} was measured at"
                f" {cost_model.hidden_size}",
                hint="give the hidden size of the measured model, or measure this one with `megatron-dynapipe profile`",
            )
        self.settings = settings
        self.cost_model = cost_model
        self.layout = settings.layout
        self._links = settings.links
        self.tables = tuple(settings.tables(cost_model, mode) for mode in settings.recompute)
        if self.layout.cuts_layers and not all(tables.division for tables in self.tables):
            raise CostModelError(
                "expected costs of attention and MLP apart, for a"
                f" {'pattern of them' if settings.pattern else f'layer split of {settings.layers_per_stage}'};"
                f" {cost_model.name} does not hold them, nor the sizes of the model by which a layer's are divided",
                hint="give whole layers to a GPT, or measure the model with `megatron-dynapipe profile`",
            )
        self._peak_covers_backward = any(tables.peak_covers_backward for tables in self.tables)
        states = np.stack([self._model_state(tables) for tables in self.tables])
        self.model_state_bytes: IntArray = states.max(axis=0)
        if self.model_state_bytes.max() >= settings.memory_limit_bytes:
            stage = int(self.model_state_bytes.argmax())
            needed, available = in_mb(int(self.model_state_bytes[stage]), settings.memory_limit_bytes)
            raise InfeasibleError(
                f"stage {stage} needs {needed} for parameters, gradients and optimizer state, of {available}",
                hint="use more pipeline stages or tensor parallelism, or the distributed optimizer",
            )
        named = msgspec.to_builtins(settings)
        if settings.split_backward == "off":
            del named["split_backward"]  # plans that cannot hold halves are those of settings that do not know them
        if settings.expert_parallel == 1 and not settings.expert_layers:  # nor do plans without experts know of them
            del named["expert_parallel"], named["expert_imbalance"], named["expert_layers"]
        for name in ("pattern", "label_experts"):
            if not named[name]:
                del named[name]
        identity = msgspec.json.encode([named, cost_model.digest])
        self.digest = hashlib.blake2b(identity, digest_size=16).hexdigest()

    def under(self, rules: TransferRules) -> "Planner":
        """A planner under these rules of transfers; this one where its settings have rules of their own."""
        if not self.settings.transfers.are_plain or rules == self.settings.transfers:
            return self
        return Planner(msgspec.structs.replace(self.settings, transfers=rules), self.cost_model)

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
        entries, scheduled = self._scheduled(batch, forward_only, seconds)
        with timed(seconds, "lowering"):
            plan = IterationPlan(
                iteration=iteration,
                family=self.settings.family,
                forward_only=forward_only,
                settings_digest=self.digest,
                pipeline_stages=self.layout.stages,
                chunks=self.layout.chunks,
                memory_limit_bytes=self.settings.memory_limit_bytes,
                model_state_bytes=tuple(self.model_state_bytes.tolist()),
                peak_covers_backward=self._peak_covers_backward,
                layouts=self.settings.micro_batch_layouts,
                in_step=self.settings.in_step,
                replicas=replica_plans(self.settings, entries, scheduled),
            )
        with timed(seconds, "verify"):
            verify(
                plan,
                expected_samples=batch.sample_ids.tolist(),
                fast_verify=fast_verify,
                ordered_starts=self.settings.transfers.ordered_starts,
                element_bytes=self.settings.element_bytes,
            )
        return plan, seconds

    def _scheduled(
        self, batch: GlobalBatch, forward_only: bool, seconds: dict[str, float]
    ) -> tuple[Samples, ScheduledBatch]:
        """The samples that micro-batches are made of, and these with the order of their passes."""
        with timed(seconds, "ordering"):
            batched = self.samples(batch)
            group = self.settings.in_step
            together = Lockstep.of(batched, group) if group > 1 else None
            samples = batched if together is None else together.longest(batched)
            orders = candidate_orders(samples.inputs, samples.targets)
        with timed(seconds, "partition"):
            problem = self.problem(samples, forward_only=forward_only)
            busy = min(problem.replicas // group, len(samples.ids))  # the other replicas are idle
            problem = replace(problem, replicas=busy)
            partitioned = self._partition(problem, orders)
        with timed(seconds, "schedule"):
            cut, scheduled = self._chosen(samples, problem, orders, partitioned)
            if scheduled is None:
                raise explain_infeasible(batched, self.problem(batched, forward_only=forward_only))
            if together is None:
                return samples if cut is None else cut.samples, scheduled
            problem = self.problem(batched, forward_only=forward_only)
            return together.spread(batched, problem, cut, scheduled, self.settings)

    def _chosen(
        self, samples: Samples, problem: BatchProblem, orders: list[IntArray], partitioned: OrderedPartitions
    ) -> tuple[CutBatch | None, ScheduledBatch | None]:
        """The samples in pieces, None for whole ones, and the fastest schedule found of them, None where none fits.

        Of both the one is searched that is ahead where searches begin; both of few rows, of which that tells little.
        """
        begun, both = self._begin_pieces(samples, problem, partitioned)
        if begun is None:
            if (whole := self._schedule_whole(problem, orders, partitioned)) is not None:
                return None, whole
            begun, _ = self._begin_pieces(samples, problem, None)
        if begun is None:
            return None, None
        cut = self._schedule(begun.problem, begun.partitioned, searchable=True)
        asked = isinstance(self.settings.slices, int)
        if cut is not None and (asked or not (both or len(cut.members) <= FEW_ROWS * problem.replicas)):
            return begun, cut
        if cut is None and asked:
            notice(f"no order of pieces of at most {self.settings.slices} positions was found: samples stay whole")
        whole = self._schedule_whole(problem, orders, partitioned)
        is_faster = cut is not None and (whole is None or cut.makespan_ns <= whole.makespan_ns)
        return (begun, cut) if is_faster else (None, whole)

    def _schedule_whole(
        self, problem: BatchProblem, orders: list[IntArray], partitioned: OrderedPartitions
    ) -> ScheduledBatch | None:
        searchable = self.settings.partition is None
        scheduled = self._schedule(problem, partitioned, searchable=searchable)
        if scheduled is None and searchable and self._packs_first:
            partitioned = partition(problem, orders, improve=len(orders) > 1)
            scheduled = self._schedule(problem, partitioned, searchable=True)
        return scheduled

    def _begin_pieces(
        self, samples: Samples, problem: BatchProblem, partitioned: OrderedPartitions | None
    ) -> tuple[CutBatch | None, bool]:
        """Samples cut in the way that promises the most, None where whole ones promise more; whether to search both.

        Args:
            samples: of the batch.
            problem: of whole samples.
            partitioned: where whole samples begin; None where they do not fit.
        """
        s = self.settings
        if not s.may_cut or problem.forward_only or not can_cut(problem):
            return None, False
        multiple = LENGTH_MULTIPLE * s.tensor_parallel
        strict = isinstance(s.slices, int) or partitioned is None  # for memory, the longest piece counts
        limits = [s.slices] if isinstance(s.slices, int) else piece_limits(samples, problem, needed=partitioned is None)
        best: CutBatch | None = None
        least, few = NEVER, False
        if limits and partitioned is not None and not isinstance(s.slices, int):
            whole, rows = self._begin(problem, partitioned, NEVER)
            few = 0 < rows <= FEW_ROWS
            least = whole if whole >= NEVER else int(whole * (1 + MARGIN_OF_FEW if few else 1 - LEAST_GAIN))
        for most in limits:
            cut = cut_batch(
                samples, problem, most, multiple, recompute=s.recompute, element_bytes=s.element_bytes, strict=strict
            )
            if cut is None:
                continue
            if isinstance(s.slices, int):
                return cut, False
            begun, _ = self._begin(cut.problem, cut.partitioned, least)
            if begun < least:
                best, least = cut, begun
        return best, few

    def _begin(self, problem: BatchProblem, partitioned: OrderedPartitions, most: int) -> tuple[int, int]:
        """What a search begins with, by the first rules of transfers that allow any; as `search.begin`."""
        begun = begin(problem, partitioned, most)
        for rules in self.settings.transfers.relaxed():
            if begun[0] < NEVER:
                break
            begun = begin(replace(problem, transfers=rules), partitioned, most)
        return begun

    def samples(self, batch: GlobalBatch) -> Samples:
        """The batch's lengths in padded positions.

        Raises:
            PlanningError: no sample.
            DataError: a sample is empty, or longer than what it is to be padded to.
        """
        if not len(batch):
            raise PlanningError("expected at least one sample in a global batch, got none", hint="use larger batches")
        samples = Samples.of(batch, self.settings.family)
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
            layouts=s.micro_batch_layouts,
            modes=self.tables,
            layout=self.layout,
            model_state_bytes=self.model_state_bytes,
            memory_limit_bytes=s.memory_limit_bytes,
            in_flight=self.in_flight_options(),
            replicas=s.data_parallel,
            links=self._links,
            bytes_per_position=s.hidden_size * s.element_bytes,
            held_per_position=s.hidden_size * s.element_bytes // (s.tensor_parallel if s.sequence_parallel else 1),
            forward_only=forward_only,
            peak_covers_backward=self._peak_covers_backward,
            transfers=s.transfers,
            split_backward="off" if forward_only else s.effective_split_backward,
        )

    def in_flight_options(self) -> IntArray:
        """How many micro-batches each stage is to have memory for: a full pipeline's number, half of it, one."""
        full = np.arange(self.layout.stages, 0, -1) * self.layout.chunks
        most = sorted({int(full[0]), -(-int(full[0]) // 2), 1}, reverse=True)
        return np.asarray(np.minimum(full, np.array(most)[:, None]))

    def fits_alone(self, samples: Samples) -> BoolArray:
        """Whether each sample fits as a micro-batch of its own, alone in flight: bool[samples]."""
        return fits_alone(self.problem(samples))

    def _model_state(self, tables: CostTables) -> IntArray:
        if self.settings.model_state_bytes is not None:
            return np.array(self.settings.model_state_bytes, np.int64)
        return self.layout.model_state_bytes(
            tables.state,
            data_parallel=self.settings.data_parallel,
            distributed_optimizer=self.settings.distributed_optimizer,
        )

    @property
    def _packs_first(self) -> bool:
        """Whether partitions for padded micro-batches can wait until no packed rows are found.

        So it is where packed rows cost what is derived from padded ones: they cost no more.
        """
        derived = all(tables.packed is None for tables in self.tables)
        return derived and set(self.settings.micro_batch_layouts) == set(BatchLayout)

    def _partition(self, problem: BatchProblem, orders: list[IntArray]) -> OrderedPartitions:
        s = self.settings
        if s.partition is not None:
            return s.partition.partitions(problem, orders[0], hidden_size=s.hidden_size)
        if BatchLayout.PADDED not in s.micro_batch_layouts or self._packs_first:
            return OrderedPartitions(order=orders[0], partitions=())  # The search begins with rows of its own.
        return partition(problem, orders, improve=len(orders) > 1)

    def _schedule(
        self,
        problem: BatchProblem,
        partitioned: OrderedPartitions,
        *,
        searchable: bool,
        chosen: ScheduleSettings | None = None,
    ) -> ScheduledBatch | None:
        """The fastest schedule by the first rules of transfers under which there is one, or None."""
        rules = self.settings.transfers.relaxed()
        rows_alone = BatchLayout.PADDED not in self.settings.micro_batch_layouts or problem.chains is not None
        while True:
            stalled: StallError | None = None
            try:
                schedule = chosen or self.settings.schedule
                scheduled = schedule_batch(problem, partitioned, schedule, searchable=searchable)
            except StallError as error:
                scheduled, stalled = None, error
            # A search that begins with packed rows drops those that stall, and says as little of them as of memory.
            if scheduled is not None or not (stalled or rows_alone):
                return scheduled
            if (following := next(rules, None)) is None:
                if stalled is not None:
                    raise stalled
                return None
            problem = replace(problem, transfers=following)
