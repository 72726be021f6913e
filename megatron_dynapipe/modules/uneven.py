"""Training over stages with different numbers of replicas, as `orchestrate` plans them.

    unit of 6 samples   stage 0 on ranks 0, 1     stage 1 on rank 2
                        [0 1 2] [3 4 5]     ──►   [0 1 2 3 4 5]        activations, along the batch
                        [0 1 2] [3 4 5]     ◄──   [0 1 2 3 4 5]        their gradients

Every unit is a micro-batch of an ordinary list, in 1F1B; what a stage sends is split over the replicas of the next one
by the transport (`modules.sliced`). After the last pass each stage sums its gradients over its replicas.

A stage takes one tensor, whose first dimension is the batch's, and returns one. Messages go over gloo, from the host's
memory: for models that need no such stages, `Pipeline` sends from the device.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, override

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.pipeline import Pipeline
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.shapes import Structure, TensorMeta
from megatron_dynapipe.modules.sliced import SlicedTransport, slices
from megatron_dynapipe.modules.stage import Stage
from megatron_dynapipe.modules.steps import StepWork
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.runtime import HostStagedTransport, TorchTransport, Transport
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.process_groups import group_of_each, make_groups

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

    def _divided(self, batch: Any, *, forward_only: bool = False) -> StepWork:
        units, most = self._micro_batches or 1, max(map(len, self.part.ranks.ranks_of))
        inputs, targets = len(batch["inputs"]), len(batch["targets"])
        if targets != inputs or inputs // units < most:
            raise DataError(
                f"expected as many targets as inputs, at least {units * most} for {units} units over {most} replicas, "
                f"got {inputs} inputs and {targets} targets"
            )
        return super()._divided(batch, forward_only=forward_only)


class _UnevenRanks(Ranks):
    """A rank's place among stages of several ranks each."""

    def __init__(self, stages: Sequence[Sequence[int]], timeout_s: float) -> None:
        world, rank = range(dist.get_world_size()), dist.get_rank()
        if sorted(itertools.chain(*stages)) != list(world) or not all(stages):
            raise ConfigError(
                f"expected stages that have each of {len(world)} ranks once, got {[list(ranks) for ranks in stages]}",
                hint="a plan that leaves devices unused is run on fewer ranks",
            )
        self.control, self.timeout_s = ControlGroup(timeout_s=timeout_s), timeout_s
        self.ranks_of = [list(ranks) for ranks in stages]
        self.stages, self.stage = len(stages), next(at for at, ranks in enumerate(stages) if rank in ranks)
        self.replica = self.ranks_of[self.stage].index(rank)
        self.pipeline, self.alike = [ranks[0] for ranks in stages], [list(world)]

    def slice_of(self, rows: int) -> slice:
        """Rows of a unit that this rank runs."""
        mine = slices(rows, len(self.ranks_of[self.stage]))[self.replica]
        return slice(mine.start, mine.stop)

    def group_of_replicas(self, backend: str) -> dist.ProcessGroup | None:
        """The ranks of this stage."""
        return group_of_each(self.ranks_of, backend=backend, timeout_s=self.timeout_s)

    def group_of_stages(self, backend: str) -> dist.ProcessGroup | None:
        """None: gradients are not clipped."""
        return None


class _SlicedStage(Stage):
    """A stage of which every rank runs its slice of each unit."""

    ranks: _UnevenRanks

    @property
    def backend(self) -> str:
        """Of messages through the host."""
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
        self._transport = SlicedTransport(wire, self.ranks.ranks_of, rank=dist.get_rank())
        return self._transport, groups.channels.values()

    @override
    def share(self, batch: Batch) -> Batch:
        return {key: value[self.ranks.slice_of(len(value))] for key, value in batch.items()}

    @override
    def expect(self, plan: StagePlan, batches: Sequence[Batch]) -> None:
        self._transport.expect(plan.instructions, [len(batch["inputs"]) for batch in batches])

    def _find_arguments(self, module: nn.Module) -> dict[str, str]:
        return {} if self.stage else {next(iter(inspect.signature(module.forward).parameters)): "inputs"}

    def _crossing(self, batch: Batch, autocast: torch.dtype | None) -> tuple[Structure | None, Structure | None]:
        """What this rank receives and sends of a unit."""
        rows = self.ranks.slice_of(len(batch["inputs"]))
        received, sent = super()._crossing(batch, autocast)
        return received and _with_rows(received, rows), sent and _with_rows(sent, rows)

    def _run_without_memory(
        self, batch: Batch, autocast: torch.dtype | None, received: Structure | None
    ) -> Structure | None:
        sent, rows = super()._run_without_memory(batch, autocast, received), len(batch["inputs"])
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
    """One tensor, of a slice."""
    (meta,) = structure.tensors
    shape = (rows.stop - rows.start, *meta.shape[1:])
    return Structure(structure.spec, (msgspec.structs.replace(meta, shape=shape),))


def stage_of_plan(layers: Sequence[nn.Module], plan_stages: Sequence[tuple[int, int]], stage: int) -> nn.Sequential:
    """A stage's layers of a model that is a chain of modules.

    Args:
        layers: of the whole model, one for each layer of the profile.
        plan_stages: (first layer, end) of every stage.
        stage: which.

    Raises:
        ConfigError: the plan is of another number of layers.
    """
    if plan_stages[-1][1] != len(layers):
        raise ConfigError(f"expected a plan of {len(layers)} layers, got one of {plan_stages[-1][1]}")
    first, end = plan_stages[stage]
    return nn.Sequential(*layers[first:end])
