"""Training over stages with different numbers of replicas, as `orchestrate` plans them.

    unit of 6 samples   stage 0 on ranks 0, 1     stage 1 on rank 2
                        [0 1 2] [3 4 5]     ──►   [0 1 2 3 4 5]        activations, along the batch
                        [0 1 2] [3 4 5]     ◄──   [0 1 2 3 4 5]        their gradients

Every unit is a micro-batch of an ordinary list, in 1F1B. A stage's replicas run contiguous slices of it, in order, and
send each rank of the next stage the rows that both hold. After the last pass each stage sums its gradients over its
replicas.

A stage takes one tensor, whose first dimension is the batch's, and returns one. Messages go over gloo, from the host's
memory: for models that need no such stages, `Pipeline` sends from the device.
"""

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.instructions import Channel, Instruction, RecvStart, SendStart
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.pipeline import Pipeline, StepWork
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.record import TensorMeta
from megatron_dynapipe.modules.shapes import Structure
from megatron_dynapipe.modules.stage import Stage
from megatron_dynapipe.runtime import HostStagedTransport, TorchTransport, Transport
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.process_groups import make_groups
from megatron_dynapipe.runtime.transport import JoinedWork, Work

LossFunction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | float]]
"""`loss_fn(output, target) → (sum, count)` of a slice."""


class UnevenPipeline:
    """One rank's part in training steps. Every rank makes it at the same point: it makes process groups.

    Args:
        module: this rank's stage, the same on all its replicas.
        stages: ranks of every stage, in order; every rank of the job is in one stage.
        optimizer: over the module's parameters; None leaves the gradients where they are.
        loss_fn: called on the last stage's ranks with their slice of each unit.
        units: in which each batch goes through the pipeline, one after another.
        timeout_s: deadline of every transfer.

    Raises:
        ConfigError: the stages are not a division of the job's ranks, or there are no units.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[int]],
        optimizer: torch.optim.Optimizer | None,
        loss_fn: LossFunction,
        *,
        units: int,
        timeout_s: float = 300.0,
    ) -> None:
        if units < 1:
            raise ConfigError(f"expected at least one unit, got {units}")
        part = _SlicedStage(module, _UnevenRanks(stages, timeout_s))
        self._pipeline = _OfUnits(
            part,
            optimizer,
            lambda output, batch: loss_fn(output, batch["targets"]),
            micro_batches=units,
            timeout_s=timeout_s,
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train one batch; the loss, sum over everything / count over everything, on every rank.

        Raises:
            DataError: on every rank alike: fewer samples than units, or than a stage's replicas in a unit.
            ConfigError: on every rank alike: a stage cannot run what it receives, or does not return one tensor.
        """
        return float(self._pipeline.step({"inputs": inputs, "targets": targets}).loss)


class _OfUnits(Pipeline):
    """A pipeline of sliced stages, whose micro-batches are the units."""

    part: "_SlicedStage"

    @override
    def _shared_out(self, batch: Any, *, forward_only: bool = False) -> StepWork:
        units = self._micro_batches or 1
        most = max(map(len, self.part.ranks.by_stage))
        inputs = len(batch["inputs"])
        targets = len(batch["targets"])
        if targets != inputs or inputs // units < most:
            raise DataError(
                f"expected as many targets as inputs, at least {units * most} for {units} units over {most} replicas, "
                f"got {inputs} inputs and {targets} targets"
            )
        return super()._shared_out(batch, forward_only=forward_only)


class _UnevenRanks(Ranks):
    """A rank's place among stages of several ranks each."""

    def __init__(self, stages: Sequence[Sequence[int]], timeout_s: float) -> None:
        world = range(dist.get_world_size())
        rank = dist.get_rank()
        if sorted(itertools.chain(*stages)) != list(world) or not all(stages):
            raise ConfigError(
                f"expected stages that have each of {len(world)} ranks once, got {[list(ranks) for ranks in stages]}",
                hint="a plan that leaves devices unused is run on fewer ranks",
            )
        self.control = ControlGroup(timeout_s=timeout_s)
        self.timeout_s = timeout_s
        self.by_stage = [list(ranks) for ranks in stages]
        self.pipelines = []
        self.stages = len(stages)
        self.stage = next(at for at, ranks in enumerate(stages) if rank in ranks)
        self.replica = self.by_stage[self.stage].index(rank)
        self.pipeline = [ranks[0] for ranks in stages]
        self.alike = [list(world)]

    def slice_of(self, rows: int) -> slice:
        """Rows of a unit that this rank runs."""
        rows_here = slices(rows, len(self.by_stage[self.stage]))[self.replica]
        return slice(rows_here.start, rows_here.stop)


class _SlicedStage(Stage):
    """A stage with several ranks; each runs its slice of every unit."""

    ranks: _UnevenRanks

    @property
    @override
    def backend(self) -> str:
        return "gloo"

    def __init__(self, module: nn.Module, ranks: _UnevenRanks) -> None:
        super().__init__(module, {"inputs": None}, labels=["targets"], ranks=ranks)
        self._transport: SlicedTransport

    @override
    def connect(self, timeout_s: float) -> tuple[Transport, Iterable[dist.ProcessGroup]]:
        world = range(dist.get_world_size())
        groups = make_groups([world], chunks=1, backend=self.backend, timeout_s=timeout_s)
        assert groups is not None, "all ranks are in it"
        wire: Transport = TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s)
        wire = HostStagedTransport(wire) if self.device.type == "cuda" else wire
        self._transport = SlicedTransport(wire, self.ranks)
        return self._transport, groups.channels.values()

    @override
    def share(self, batch: Batch) -> Batch:
        return {key: value[self.ranks.slice_of(len(value))] for key, value in batch.items()}

    @override
    def expect(self, plan: StagePlan, batches: Sequence[Batch]) -> None:
        self._transport.expect(plan.instructions, [len(batch["inputs"]) for batch in batches])

    @override
    def _find_arguments(self, module: nn.Module) -> dict[str, str]:
        return {} if self.stage else {next(iter(inspect.signature(module.forward).parameters)): "inputs"}

    @override
    def _crossing(self, batch: Batch, autocast: torch.dtype | None) -> tuple[Structure | None, Structure | None]:
        rows = self.ranks.slice_of(len(batch["inputs"]))
        received, sent = super()._crossing(batch, autocast)
        return received and _with_rows(received, rows), sent and _with_rows(sent, rows)

    @override
    def _run_without_memory(
        self, batch: Batch, autocast: torch.dtype | None, received: Structure | None
    ) -> Structure | None:
        sent = super()._run_without_memory(batch, autocast, received)
        rows = len(batch["inputs"])
        if sent is None:
            return None
        match sent.leaves:
            case (TensorMeta(shape=(samples, *_), differentiable=True),) if samples == rows:
                return sent
        raise ConfigError(
            f"expected stage {self.stage} to return one floating tensor of {rows} samples, as many as it takes, got "
            f"{sent.leaves}"
        )


def _with_rows(structure: Structure, rows: slice) -> Structure:
    (meta,) = structure.tensors
    return Structure(structure.spec, (meta._replace(shape=(rows.stop - rows.start, *meta.shape[1:])),))


def slices(rows: int, replicas: int) -> list[range]:
    """The rows of every replica, in order: equal, the first ones having one more where they do not divide."""
    ends = [0, *itertools.accumulate(rows // replicas + (at < rows % replicas) for at in range(replicas))]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


class SlicedTransport:
    """Sends and receives this rank's slice of each message in pieces, one for each rank that shares rows with it.

    `transport` carries the pieces; it addresses ranks by their global number where others address stages.
    """

    def __init__(self, transport: Transport, ranks: _UnevenRanks) -> None:
        self._transport = transport
        self._ranks = ranks
        self._rows: deque[int] = deque()

    def expect(self, instructions: Sequence[Instruction], rows: Sequence[int]) -> None:
        """Take note of the list that runs next: its transfers start in its order, and a message does not say its rows.

        `rows` has the number of every micro-batch's rows, over all replicas of a stage.
        """
        transfers = (i for i in instructions if isinstance(i, SendStart | RecvStart))
        self._rows = deque(rows[transfer.micro_batch] for transfer in transfers)

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending this rank's slice."""
        pieces = self._pieces(stage)
        return JoinedWork([self._transport.start_send(channel, to, [t[rows] for t in tensors]) for to, rows in pieces])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving this rank's slice, every piece in its place."""
        pieces = self._pieces(stage)
        return JoinedWork([self._transport.start_recv(channel, of, [t[rows] for t in tensors]) for of, rows in pieces])

    def _pieces(self, stage: int) -> list[tuple[int, slice]]:
        """Ranks of another stage that share rows of the next message, and which they are of this rank's."""
        rows = self._rows.popleft()
        ranks = self._ranks.by_stage[stage]
        here = self._ranks.slice_of(rows)
        pieces = []
        for rank, there in zip(ranks, slices(rows, len(ranks)), strict=True):
            first = max(here.start, there.start)
            end = min(here.stop, there.stop)
            if first < end:
                pieces.append((rank, slice(first - here.start, end - here.start)))
        return pieces


def stage_of_plan(layers: Sequence[nn.Module], plan_stages: Sequence[tuple[int, int]], stage: int) -> nn.Sequential:
    """A stage's layers of a model that is a chain of modules.

    Args:
        layers: the whole model's, one for each layer of the profile.
        plan_stages: (first layer, end) of every stage.
        stage: which.

    Raises:
        ConfigError: the plan is of another number of layers.
    """
    if plan_stages[-1][1] != len(layers):
        raise ConfigError(f"expected a plan of {len(layers)} layers, got one of {plan_stages[-1][1]}")
    first, end = plan_stages[stage]
    return nn.Sequential(*layers[first:end])
