"""The time of a candidate's iterations: plans of batches, in this process or in several, and what comes after them.

    pipeline ─────────────────────────► │ reduce-scatter (or all-reduce) │ step │ all-gather
    (planned: forward, backward, transfers)  per stage; the slowest stage counts

If a run overlaps them, passes hide a part of reduction and gathering (`tuning.overlap`). Gradients are reduced in
fp32, as Megatron does for bf16. A ring's messages cross the links inside a node first, then every device's
own link between nodes, then the links inside the node again:

    inside a node of l replicas      2 (l - 1) / l · bytes          at a link inside the node
    between m nodes                  2 (m - 1) / m · bytes / l      at a link between nodes

and every hop takes its link's latency. The step reads gradient, master weight and both moments, and writes all but the
gradient and the parameter in half precision: 30 bytes a parameter.
"""

import math
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Self

import msgspec

from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.costs import HEAD
from megatron_dynapipe.core.errors import ConfigError, DynaPipeError, PlanningError
from megatron_dynapipe.core.memory import peak_bytes
from megatron_dynapipe.core.model import LayerSplit
from megatron_dynapipe.core.plan import idle_share
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing import CostModel, ModelState
from megatron_dynapipe.costing.state import expert_bytes, parameter_bytes, trained_bytes
from megatron_dynapipe.processes import set_parent_death_signal
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning.overlap import (
    EdgePasses,
    buckets,
    edge_passes,
    exposed_gathering_ns,
    exposed_reduction_ns,
)

PLAN_DEADLINE_S = 600.0
"""Within which one of the plans under way must be done."""
TRIALS = 6
"""Splits planned at most where one is improved, in each of its steps."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The time and memory of a candidate's plan of one batch.

    Attributes:
        predicted_ns: forward, backward and transfers; 0 with an error.
        peak_bytes: on every pipeline rank, of the replica that needs most.
        idle: share of all stages' time in which no pass runs.
        micro_batches: the number on the replica that has most.
        recompute: modes of micro-batches, as `none+full`.
        edges: passes that may hide reduction and gathering; None with an error.
        error: why there is no plan.
    """

    predicted_ns: int = 0
    peak_bytes: tuple[int, ...] = ()
    idle: float = 0.0
    micro_batches: int = 0
    recompute: str = ""
    edges: EdgePasses | None = None
    error: str | None = None


type Improved = tuple[LayerSplit, list[Outcome]]
"""A layer split, and the plans under it."""


class Evaluator:
    """Plans batches under settings; a planner is made once for each settings."""

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch]) -> None:
        self._cost_model = cost_model
        self._batches = list(batches)
        self._planners: dict[PlannerSettings, Planner] = {}

    def __call__(self, settings: PlannerSettings, batch: int) -> Outcome:
        """The plan of a batch, or why there is none."""
        try:
            if settings not in self._planners:
                self._planners[settings] = planner_of(settings, self._cost_model)
            plan = self._planners[settings].plan(self._batches[batch], batch)
        except DynaPipeError as error:
            return Outcome(error=error.message)
        peaks = [
            max(peak_bytes(plan, replica, stage, settings.element_bytes) for replica in plan.replicas)
            for stage in range(plan.pipeline_stages)
        ]
        modes = {mode for replica in plan.replicas for mb in replica.micro_batches for mode in mb.recompute}
        timeline = tuple(stage.predicted for replica in plan.replicas for stage in replica.stages)
        return Outcome(
            predicted_ns=plan.totals.predicted_ns,
            peak_bytes=tuple(peaks),
            idle=idle_share(timeline, plan.totals.predicted_ns),
            micro_batches=max(plan.totals.micro_batches),
            recompute="+".join(mode for mode in Recompute if mode in modes),
            edges=edge_passes(plan),
        )

    def improved(self, settings: PlannerSettings, chunks: Sequence[int], halves: bool) -> Improved:
        """The layers, over these numbers of virtual stages, split as training does, and the plans of all batches."""
        more = [count for count in chunks if count != settings.chunks]
        try:
            split = choose_layer_split(
                settings, self._cost_model, self._batches, halves=halves, chunks=more, trials=TRIALS
            )
        except DynaPipeError as error:
            return settings.layout.layers_per_stage, [Outcome(error=error.message)]
        chosen = settings.with_layers_per_stage(split)
        return split, [self(chosen, number) for number in range(len(self._batches))]


_evaluator: Evaluator | None = None
"""A worker process's own."""


def _begin(evaluator: Evaluator) -> None:
    global _evaluator
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that searches.
    set_parent_death_signal(signal.SIGKILL)
    _evaluator = evaluator


def _evaluate(settings: PlannerSettings, batch: int) -> Outcome:
    assert _evaluator is not None
    return _evaluator(settings, batch)


def _improve(settings: PlannerSettings, chunks: Sequence[int], halves: bool) -> Improved:
    assert _evaluator is not None
    return _evaluator.improved(settings, chunks, halves)


class Workers:
    """Evaluates as many plans at a time as there are processes; with one, in this process."""

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch], workers: int) -> None:
        evaluator = Evaluator(cost_model, batches)
        self._executor: Executor = ThreadPoolExecutor(1)
        self._evaluate: Callable[[PlannerSettings, int], Outcome] = evaluator
        self._improve: Callable[[PlannerSettings, Sequence[int], bool], Improved] = evaluator.improved
        if workers > 1:
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(evaluator,))
            self._evaluate = _evaluate
            self._improve = _improve
        self._workers = workers
        self._futures: dict[Future[Outcome], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def running(self) -> int:
        """Plans under way."""
        return len(self._futures)

    @property
    def free(self) -> bool:
        """Whether another may be started."""
        return len(self._futures) < self._workers

    def start(self, candidate: int, settings: PlannerSettings, batch: int) -> None:
        """Plan a batch for a candidate."""
        self._futures[self._executor.submit(self._evaluate, settings, batch)] = (candidate, batch)

    def improved(self, several: Sequence[PlannerSettings], chunks: Sequence[int], *, halves: bool) -> list[Improved]:
        """`Evaluator.improved` of each; raises PlanningError as `next`."""
        futures = [self._executor.submit(self._improve, settings, chunks, halves) for settings in several]
        try:
            return [future.result(PLAN_DEADLINE_S) for future in futures]
        except TimeoutError as error:
            raise PlanningError(
                f"the layers of the best layouts were not split within {PLAN_DEADLINE_S:.0f} s",
                hint="use fewer batches, or --layer-splits equal, which leaves this out",
            ) from error
        except BrokenProcessPool as error:
            raise _ended() from error

    def next(self) -> tuple[int, int, Outcome]:
        """Wait for one of the plans: candidate, batch, outcome.

        Raises:
            PlanningError: a process has ended, or no plan is done within `PLAN_DEADLINE_S`.
        """
        done, _ = wait(self._futures, timeout=PLAN_DEADLINE_S, return_when=FIRST_COMPLETED)
        if not done:
            raise PlanningError(
                f"none of {len(self._futures)} plans was done within {PLAN_DEADLINE_S:.0f} s",
                hint="use fewer batches, or fewer samples in a batch",
            )
        future = min(done, key=lambda started: self._futures[started])
        candidate, batch = self._futures.pop(future)
        try:
            return candidate, batch, future.result()
        except BrokenProcessPool as error:
            raise _ended() from error


def _ended() -> PlanningError:
    return PlanningError("a planning process ended", hint="is the host out of memory? try --workers 1")


_STORED_BYTES = 2
"""Bytes of a parameter, as cost models count them."""
_STEP_BYTES = 30


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that the reduction and the step depend on, in addition to layout and links.

    Attributes:
        gradient_bytes: bytes of a parameter's gradient in the reduction.
        memory_bytes_per_second: memory traffic that a device sustains.
        peak_flops: its data sheet's figure; None if the device is not known.
        overlaps_reduction, overlaps_gathering: whether the run has `--overlap-grad-reduce`, `--overlap-param-gather`.
    """

    gradient_bytes: int = 4
    memory_bytes_per_second: float = 8e11
    peak_flops: float | None = None
    overlaps_reduction: bool = False
    overlaps_gathering: bool = False

    def __post_init__(self) -> None:
        if self.gradient_bytes < 1 or not self.memory_bytes_per_second > 0:
            raise ConfigError(
                f"expected gradients of at least 1 byte and a memory rate above 0, got {self.gradient_bytes} and"
                f" {self.memory_bytes_per_second}"
            )


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    """The reduction of gradients and the gathering of parameters, on the slowest stage.

    Attributes:
        reduction_ns, gathering_ns: times for all of a stage's parameters; nothing is gathered without the distributed
            optimizer.
        buckets: parts of each stage's, one after another.
        overlaps_reduction, overlaps_gathering: whether passes may hide them.
    """

    reduction_ns: int
    gathering_ns: int
    buckets: tuple[int, ...]
    overlaps_reduction: bool
    overlaps_gathering: bool

    @classmethod
    def of(cls, settings: PlannerSettings, state: ModelState, rates: StepRates) -> Self:
        """That of a layout."""
        both, _ = step_ns(settings, state, rates)
        shared = _STORED_BYTES / (rates.gradient_bytes + _STORED_BYTES) if settings.distributed_optimizer else 0
        parameters = trained_bytes(settings.layout, state) // _STORED_BYTES
        return cls(
            reduction_ns=both - round(both * shared),
            gathering_ns=round(both * shared),
            buckets=tuple(buckets(int(of), settings.data_parallel, at) for at, of in enumerate(parameters)),
            overlaps_reduction=rates.overlaps_reduction,
            overlaps_gathering=rates.overlaps_gathering and settings.distributed_optimizer,
        )

    @property
    def least_ns(self) -> int:
        """What no plan hides: a bucket of the only stage's; of several stages each may have time to spare."""
        pairs = (self.reduction_ns, self.overlaps_reduction), (self.gathering_ns, self.overlaps_gathering)
        of_bucket = 1 / self.buckets[0] if len(self.buckets) == 1 else 0.0
        return sum(int(ns * of_bucket) if overlaps else ns for ns, overlaps in pairs)

    def exposed_ns(self, edges: EdgePasses) -> int:
        """What the passes of a plan do not hide."""
        reduction = self.reduction_ns
        gathering = self.gathering_ns
        if self.overlaps_reduction:
            reduction = exposed_reduction_ns(edges, reduction, self.buckets)
        if self.overlaps_gathering:
            gathering = exposed_gathering_ns(edges, gathering, self.buckets)
        return reduction + gathering


def step_ns(settings: PlannerSettings, state: ModelState, rates: StepRates) -> tuple[int, int]:
    """Time of the reduction (with the all-gather of parameters) and of the optimizer step, on the slowest stage."""
    layout = settings.layout
    shared = settings.expert_parallel
    everything = trained_bytes(layout, state)
    experts = expert_bytes(layout, state)
    reduction = stepped = 0.0
    for state_bytes, replicas, apart in (
        (everything - experts, settings.data_parallel, 1),
        (experts, settings.data_parallel // shared, shared),
    ):
        parameters = int(state_bytes.max()) // _STORED_BYTES
        if settings.distributed_optimizer:
            # Half an all-reduce of the gradients, and half a one of the parameters.
            size = parameters * (rates.gradient_bytes + _STORED_BYTES) / 2
            stepped += parameters / replicas
        else:
            size = parameters * rates.gradient_bytes
            stepped += parameters
        reduction += _ring_ns(settings, size, replicas, apart) if parameters else 0
    return math.ceil(reduction), math.ceil(stepped * _STEP_BYTES / rates.memory_bytes_per_second * 1e9)


def token_flops(settings: PlannerSettings, state: ModelState, counted: float = 1.0) -> float:
    """FLOPs of the model's weights, forward and backward: six a weight and token, without the products of attention.

    Frozen weights have no gradients, and take four. The head, and the last MLP where it does so, run `counted` of the
    tokens.
    """
    layout = settings.layout
    weights = int(parameter_bytes(layout, state).sum())
    bytes_of = {**state.modules, HEAD: state.embedding_bytes}
    over_labels = layout.over_labels(state.expert_kind, experts=settings.label_experts)
    left_out = (1 - counted) * sum(bytes_of[layout.modules[module]] for module in over_labels)
    frozen = weights - int(trained_bytes(layout, state).sum())
    return settings.tensor_parallel * (6.0 * (weights - left_out) - 2.0 * frozen) / _STORED_BYTES


def _ring_ns(settings: PlannerSettings, size_bytes: float, replicas: int, apart: int) -> float:
    """An all-reduce of so many bytes over replicas of a stage; every `apart`-th takes part."""
    network = settings.network
    inside = max(1, math.gcd(replicas, network.devices_per_node // settings.tensor_parallel // apart))
    nodes = replicas // inside
    bits = size_bytes * 8
    inside_ns = 2 * (inside - 1) * (bits / inside / network.intra_node_gbps + network.intra_node_latency_us * 1e3)
    between_ns = 2 * (nodes - 1) * (bits / inside / nodes / network.inter_node_gbps)
    return inside_ns + between_ns + 2 * (nodes - 1) * network.inter_node_latency_us * 1e3
