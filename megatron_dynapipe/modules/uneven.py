"""Training over stages with different numbers of replicas, as `orchestrate` plans them.

    unit of 6 samples   stage 0 on ranks 0, 1     stage 1 on rank 2
                        [0 1 2] [3 4 5]     ──►   [0 1 2 3 4 5]        activations, along the batch
                        [0 1 2] [3 4 5]     ◄──   [0 1 2 3 4 5]        their gradients

Every unit is a micro-batch of an ordinary list, in 1F1B; what a stage sends is split over the replicas of the next one
by the transport (`runtime.sliced`). After the last pass each stage sums its gradients over its replicas.

A stage takes one tensor, whose first dimension is the batch's, and returns one. Messages go over gloo, from the host's
memory: for models that need no such stages, `Pipeline` sends from the device.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.modules.boundary import Specialization, signature
from megatron_dynapipe.modules.gradients import Gradients
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.ranks import start_agreement
from megatron_dynapipe.modules.runner import ModuleRunner, ModuleStage
from megatron_dynapipe.modules.shapes import Place, ShapeTracker, Structure, TensorMeta, output_structure
from megatron_dynapipe.runtime import (
    HostStagedTransport,
    PendingTotals,
    SlicedTransport,
    Step,
    TorchTransport,
    Transport,
)
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.process_groups import group_of_each, make_groups
from megatron_dynapipe.runtime.sliced import slices

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
        world, rank = dist.get_world_size(), dist.get_rank()
        if sorted(itertools.chain(*stages)) != list(range(world)) or not all(stages):
            raise ConfigError(
                f"expected stages that have each of {world} ranks once, got {[list(ranks) for ranks in stages]}",
                hint="a plan that leaves devices unused is run on fewer ranks",
            )
        if units < 1:
            raise ConfigError(f"expected at least one unit, got {units}")
        self.module, self._optimizer, self._units = module, optimizer, units
        self._loss_fn = lambda output, batch: loss_fn(output, batch["targets"])
        self._stages = [list(ranks) for ranks in stages]
        self.stage = next(at for at, ranks in enumerate(self._stages) if rank in ranks)
        self.replica = self._stages[self.stage].index(rank)
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._control = ControlGroup(timeout_s=timeout_s)
        replicas = group_of_each(self._stages, backend="gloo", timeout_s=timeout_s)
        self._gradients = Gradients(module, self._device, replicas=replicas)
        groups = make_groups([range(world)], chunks=1, backend="gloo", timeout_s=timeout_s)
        assert groups is not None, "all ranks are in it"
        wire: Transport = TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s)
        if self._device.type == "cuda":
            wire = HostStagedTransport(wire)
        self._transport = SlicedTransport(wire, self._stages, rank=rank)
        self._runner = ModuleRunner(
            self._transport,
            self._device,
            stage=self.stage,
            stages=len(self._stages),
            chunks=1,
            dtype=torch.float32,
            deadline_s=timeout_s,
            control=self._control,
        )
        firsts = [ranks[0] for ranks in self._stages]
        self._tracker = ShapeTracker(Place(self.stage, len(self._stages), firsts, self._control))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train one batch; the loss, sum over everything / count over everything, on every rank.

        Args:
            inputs: the whole batch, the same on every rank of the first stage; others look at its first dimension.
            targets: of as many samples, read by the last stage.

        Raises:
            DataError: on every rank alike: fewer samples than units, or than a stage's replicas in a unit.
            ConfigError: on every rank alike: a stage cannot run what it receives, or does not return one tensor.
        """
        rows = [part.shape[0] for part in inputs.tensor_split(self._units)]
        agreement = start_agreement(
            self._control,
            self._unfit(inputs, targets, rows),
            repr((signature({"inputs": inputs[:0]}), rows)) if self.stage == 0 else "",
            "the batch's shape",
            alike=[self._stages[0]],
        )
        agreement.settle()
        key = agreement.identities[self._stages[0][0]]
        if not self._tracker.knows(key):
            self._tracker.learn({key: partial(self._sent, Structure.of(inputs), rows[0])})
        self._gradients.zero()
        specialized = [self._specialize(key, count) for count in rows]
        plan = self._runner.fill_list(specialized, "1f1b")
        self._transport.expect(plan.instructions, rows)
        stage = ModuleStage(self._runner, self._slices(inputs, targets, rows), specialized, self._loss_fn)

        def finish(totals: PendingTotals) -> None:
            _, count = totals.wait()
            self._gradients.reduce(count or 1.0)

        step = Step(plan=plan, model=stage, dtypes=stage.dtypes, agreement=agreement, finish=finish)
        totals = self._runner.run(step)
        if self._optimizer is not None:
            self._optimizer.step()
        return totals.mean_loss

    def _unfit(self, inputs: torch.Tensor, targets: torch.Tensor, rows: Sequence[int]) -> DataError | None:
        most = max(map(len, self._stages))
        if len(targets) == len(inputs) and min(rows) >= most:
            return None
        return DataError(
            f"expected as many targets as inputs, at least {self._units * most} for {self._units} units over"
            f" {most} replicas, got {len(inputs)} inputs and {len(targets)} targets"
        )

    def _mine(self, rows: int) -> range:
        return slices(rows, len(self._stages[self.stage]))[self.replica]

    def _slices(self, inputs: torch.Tensor, targets: torch.Tensor, rows: Sequence[int]) -> list[Batch]:
        """The samples of this rank in every unit."""
        parts = zip(inputs.split(list(rows)), targets.split(list(rows)), map(self._mine, rows), strict=True)
        return [{"inputs": i[mine.start : mine.stop], "targets": t[mine.start : mine.stop]} for i, t, mine in parts]

    def _specialize(self, key: bytes, rows: int) -> Specialization:
        """How a unit runs on this rank."""
        stage, mine = self.stage, len(self._mine(rows))
        crossing = zip((stage - 1, stage), self._tracker.known(key), strict=True)
        return Specialization(
            boundaries={at: _with_rows(each, mine).boundary() for at, each in crossing if each is not None},
            runs={stage: self._forward},
            keys={stage: () if stage else ("inputs",)},
        )

    def _forward(
        self, received: Sequence[torch.Tensor], batch: Batch, device: torch.device
    ) -> torch.Tensor | tuple[torch.Tensor]:
        output: torch.Tensor = self.module(*received) if self.stage else self.module(batch["inputs"])
        return output if self.stage == len(self._stages) - 1 else (output,)

    def _sent(self, inputs: Structure, rows: int, received: Structure | None) -> Structure | None:
        """What this stage returns for a unit; raises ConfigError if that cannot cross."""
        if self.stage == len(self._stages) - 1:
            return None
        mine = len(self._mine(rows))
        sent = output_structure(self.module, {}, self._device, received=_with_rows(received or inputs, mine))
        match sent.leaves:
            case (TensorMeta(shape=(samples, *_), dtype=dtype),) if samples == mine and "float" in dtype:
                return sent
        raise ConfigError(
            f"expected stage {self.stage} to return one floating tensor of {mine} samples, as many as it takes, got "
            f"{sent.leaves}"
        )


def _with_rows(structure: Structure, rows: int) -> Structure:
    """One tensor, of a slice with so many samples, whose gradient is sent back."""
    (meta,) = structure.tensors
    resized = msgspec.structs.replace(meta, shape=(rows, *meta.shape[1:]), differentiable="float" in meta.dtype)
    return Structure(structure.spec, (resized,))


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
