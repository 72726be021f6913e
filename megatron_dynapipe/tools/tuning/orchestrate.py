"""Stages with different numbers of replicas for a model given as a chain of layers (the task of DAPPLE's planner).

    micro-batches   ▪▪▪▪ ▪▪▪▪ ▪▪▪▪       a unit of one or more micro-batches goes from stage to stage;
    stage 0 (× 3)   each unit in thirds   every stage splits it over its replicas, so a device gets a part of a
    stage 1 (× 1)   each unit whole       micro-batch (split) or several together (packed)

The search is a dynamic program over layers × free devices × placement in the native core (`csrc/search/orchestrate.h`),
which keeps labels that an analytic bound does not rule out; `simulate` ranks its plans: 1F1B, links that carry one
message at a time, and every stage's all-reduce after its last backward, while earlier stages still run theirs.

Source of the task and of the overlap of reductions with the drain: Fan et al., DAPPLE, PPoPP 2021 (arXiv:2007.01045).
"""

import itertools
import time
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import IntArray
from megatron_dynapipe.core.errors import ConfigError, InfeasibleError
from megatron_dynapipe.core.instructions import PASS_TYPES
from megatron_dynapipe.core.native import NEVER, core
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS
from megatron_dynapipe.tools.tuning.layer_profile import LayerProfile
from megatron_dynapipe.tools.tuning.topology import Counts, Topology

_BEAMS = ((24, 48), (700, 160))
"""(labels kept of a number of stages, plans simulated) of each round: the first finds a plan to prune with."""


class OrchestratedStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage.

    Attributes:
        first_layer, end_layer: its layers, `end_layer` not among them.
        devices: its replicas' devices, numbered node by node.
        samples_per_replica: samples of a unit on its busiest replica.
        peak_memory_mb: peak memory of a replica, with model state.
    """

    first_layer: int
    end_layer: int
    devices: tuple[int, ...]
    samples_per_replica: int
    peak_memory_mb: float

    @property
    def replicas(self) -> int:
        """Number of devices."""
        return len(self.devices)


class Orchestration(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its predicted iteration.

    Attributes:
        stages: in order.
        unit_samples: samples of the micro-batches that go through the pipeline together.
        units: the number of units of an iteration.
        predicted_ms: time of an iteration: forward, backward, transfers, reductions, without the optimizer step.
        speedup: over one device that runs the micro-batches one after another.
        bound_ms: no plan of the space takes less; `predicted_ms` where that is proven.
        seconds: the search took.
    """

    stages: tuple[OrchestratedStage, ...]
    unit_samples: int
    units: int
    predicted_ms: float
    speedup: float
    bound_ms: float = 0.0
    seconds: float = 0.0


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Layers and devices of every stage: a plan before it is simulated.

    Attributes:
        ends: the end of every stage's layers; the last one is the number of layers.
        placements: every stage's devices on each node.
        micro_batches: in a unit.
    """

    ends: tuple[int, ...]
    placements: tuple[Counts, ...]
    micro_batches: int


def orchestrate(
    profile: LayerProfile,
    micro_batch_size: int,
    global_batch_size: int,
    devices: Topology,
) -> Orchestration:
    """The plan that is predicted to be fastest.

    Args:
        profile: the model's layers.
        micro_batch_size: samples of a micro-batch; units are some of them together.
        global_batch_size: samples of an iteration, a multiple of it.
        devices: the cluster; a plan may leave devices unused.

    Raises:
        ConfigError: the global batch is no multiple of the micro-batch.
        InfeasibleError: no plan fits into the devices' memory.
    """
    problem = OrchestrationProblem(profile, micro_batch_size, global_batch_size, devices)
    start = time.perf_counter()
    best: tuple[int, Assignment] | None = None
    dropped = NEVER
    for beam, most in _BEAMS:
        dropped = NEVER
        for micro_batches in problem.unit_sizes:
            incumbent = best[0] if best else NEVER
            choices, least = problem.search(micro_batches, incumbent, beam, most)
            dropped = min(dropped, least)
            for bound, choice in choices:
                if best is not None and bound >= best[0]:
                    continue
                predicted = problem.predicted_ns(choice)
                if predicted is not None and (best is None or predicted < best[0]):
                    best = predicted, choice
        if best is not None and dropped >= best[0]:
            break
    if best is None:
        raise InfeasibleError(
            f"expected a plan of {profile.name} whose stages fit {devices.memory_bytes or 0:,} bytes on each of"
            f" {devices.devices} devices, found none",
            hint="give more devices, more memory or smaller micro-batches",
        )
    plan = problem.orchestration(best[1])
    return msgspec.structs.replace(
        plan, bound_ms=min(best[0], dropped) / NS_PER_MS, seconds=time.perf_counter() - start
    )


class OrchestrationProblem:
    """The costs of a profile on a cluster, the search over them, and the simulation of single plans.

    The arguments are `orchestrate`'s.
    """

    def __init__(
        self,
        profile: LayerProfile,
        micro_batch_size: int,
        global_batch_size: int,
        topology: Topology,
    ) -> None:
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise ConfigError(
                "expected a global batch of a multiple of the micro-batch's samples, got"
                f" {global_batch_size} and {micro_batch_size}"
            )
        self.profile = profile
        self.topology = topology
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._parameters = profile.before([layer.parameter_bytes for layer in profile.layers])
        self._state = profile.state_bytes
        self._limit = NEVER if topology.memory_bytes is None else topology.memory_bytes
        self._costs: dict[int, tuple[IntArray, IntArray, IntArray]] = {}

    @property
    def unit_sizes(self) -> list[int]:
        """Numbers of micro-batches that a unit may have: divisors of an iteration's number."""
        count = self._global_batch_size // self._micro_batch_size
        return [size for size in range(1, count + 1) if count % size == 0]

    def samples_per_replica(self, micro_batches: int, replicas: int) -> int:
        """Samples of a unit on the busiest replica, which has one more where they do not divide."""
        return -(-micro_batches * self._micro_batch_size // replicas)

    def search(
        self, micro_batches: int, incumbent: int, beam: int, most: int
    ) -> tuple[list[tuple[int, Assignment]], int]:
        """Plans of a unit size that may take less than the incumbent, with their bounds; the least bound dropped."""
        forward, backward, stored = self._slices(micro_batches)
        placements = self.topology.placements
        samples = micro_batches * self._micro_batch_size
        flat = np.array([pair for choices in placements.choices for pair in choices], np.int64).reshape(-1, 2)
        plans, dropped = core.orchestrate(
            units=self._units(micro_batches),
            forward=forward,
            backward=backward,
            stored=stored,
            boundary=self._boundaries(samples),
            parameters=self._parameters,
            state_bytes=self._state,
            memory_limit=self._limit,
            replicas=np.array([sum(counts) for counts in placements.counts], np.int64),
            reductions=self.topology.reductions,
            transfers=self.topology.transfers,
            first_choice=np.array([0, *itertools.accumulate(map(len, placements.choices))], np.int64),
            choice_placement=flat[:, 0].copy(),
            choice_state=flat[:, 1].copy(),
            free_devices=np.array(placements.free, np.int64),
            incumbent=incumbent,
            beam=beam,
            most=most,
        )
        choices = [
            (
                bound,
                Assignment(
                    ends=tuple(ends),
                    placements=tuple(map(placements.counts.__getitem__, at)),
                    micro_batches=micro_batches,
                ),
            )
            for bound, ends, at in plans
        ]
        return choices, dropped

    def predicted_ns(self, choice: Assignment) -> int | None:
        """Time of an iteration; None where a stage's memory is not enough."""
        predicted, peaks = self._simulate(choice)
        return predicted if max(peaks) <= self._limit else None

    def orchestration(self, choice: Assignment) -> Orchestration:
        """A plan with everything that is predicted of it."""
        predicted, peaks = self._simulate(choice)
        stages = zip(
            (0, *choice.ends), choice.ends, self.topology.devices_of(list(choice.placements)), peaks, strict=False
        )
        single_ms = self.profile.single_device_ms(self._micro_batch_size, self._global_batch_size)
        return Orchestration(
            stages=tuple(
                OrchestratedStage(
                    first_layer=first,
                    end_layer=end,
                    devices=devices,
                    samples_per_replica=self.samples_per_replica(choice.micro_batches, len(devices)),
                    peak_memory_mb=peak / BYTES_PER_MB,
                )
                for first, end, devices, peak in stages
            ),
            unit_samples=choice.micro_batches * self._micro_batch_size,
            units=self._units(choice.micro_batches),
            predicted_ms=predicted / NS_PER_MS,
            speedup=single_ms * NS_PER_MS / predicted if predicted else 1.0,
        )

    def _units(self, micro_batches: int) -> int:
        return self._global_batch_size // (micro_batches * self._micro_batch_size)

    def _slices(self, micro_batches: int) -> tuple[IntArray, IntArray, IntArray]:
        """Forward and backward time and stored bytes of a slice, by number of replicas, summed over layers."""
        if micro_batches not in self._costs:
            most = self.topology.devices
            layers = self.profile.layers
            forward, backward, stored = (np.zeros((most + 1, len(layers) + 1), np.int64) for _ in range(3))
            kept = self.profile.before([layer.stored_bytes for layer in layers])
            for replicas in range(1, most + 1):
                samples = self.samples_per_replica(micro_batches, replicas)
                for rows, times in zip((forward, backward), self.profile.times_ns(samples), strict=True):
                    rows[replicas] = np.rint(self.profile.before(times.tolist())).astype(np.int64)
                stored[replicas] = np.rint(kept * samples).astype(np.int64)
            self._costs[micro_batches] = forward, backward, stored
        return self._costs[micro_batches]

    def _boundaries(self, samples: int) -> npt.NDArray[np.float64]:
        crossing = [layer.boundary_bytes for layer in self.profile.layers[:-1]]
        return np.array([0.0, *crossing, 0.0]) * samples

    def _simulate(self, choice: Assignment) -> tuple[int, list[int]]:
        """Time of an iteration, and every stage's peak memory."""
        begins = np.array([0, *choice.ends[:-1]])
        ends = np.array(choice.ends)
        replicas = np.array([sum(counts) for counts in choice.placements])
        units = self._units(choice.micro_batches)
        stages = len(choice.ends)
        forward, backward, stored = (
            rows[replicas, ends] - rows[replicas, begins] for rows in self._slices(choice.micro_batches)
        )
        crossing = self._boundaries(choice.micro_batches * self._micro_batch_size)[begins]
        transfer = np.zeros(stages + 1, np.int64)
        for stage, (source, target) in enumerate(itertools.pairwise(choice.placements), 1):
            latency, rate = self.topology.transfer(source, target)
            transfer[stage] = np.rint(latency + rate * crossing[stage])
        none = np.zeros(stages, np.int64)  # no second halves of backward passes, and messages that take no memory
        rows = (forward, backward, stored, stored, transfer[1:], transfer[:-1], none, none, none)
        _, finished, peaks, _, stalled = core.simulate(
            [np.ascontiguousarray(np.tile(row, (units, 1))) for row in rows],
            1,
            self._state[ends] - self._state[begins],
            False,
            one_f_one_b_codes(units, stages),
            True,
        )
        assert not stalled
        sizes = self._parameters[ends] - self._parameters[begins]
        reductions = (self.topology.reduction(counts) for counts in choice.placements)
        reduced = [int(np.rint(late + rate * size)) for (late, rate), size in zip(reductions, sizes, strict=True)]
        return max(int(end) + ns for end, ns in zip(finished[:, -1], reduced, strict=True)), peaks


@lru_cache(maxsize=256)
def one_f_one_b_codes(units: int, stages: int) -> IntArray:
    """1F1B as the native core takes it, `[stages, 2 · units]`: `PASS_TYPES` times the unit, and 1 for a backward."""
    codes = np.empty((stages, 2 * units), np.int64)
    for stage in range(stages):
        ahead = min(units, stages - stage)
        forwards = [len(PASS_TYPES) * unit for unit in range(units)]
        backwards = [code + 1 for code in forwards]
        paired = [code for pair in zip(backwards, forwards[ahead:], strict=False) for code in pair]
        codes[stage] = [*forwards[:ahead], *paired, *backwards[units - ahead :]]
    return codes
