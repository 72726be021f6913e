"""The passes of any module's micro-batches on this rank, and what they add up to."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, override

import torch

from megatron_dynapipe.core.errors import DataError, ExecutionError
from megatron_dynapipe.core.instructions import Pass, RecvStart, SendStart
from megatron_dynapipe.core.passes import StageModel
from megatron_dynapipe.modules.boundary import Specialization, crossing_of
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.runtime import StepRunner
from megatron_dynapipe.runtime.control_group import AGREED

LossFunction = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor | float]]
"""Takes a model's output and the micro-batch; gives the sum of the losses and their number."""

_NO_GRAPH = -math.inf
"""Count of a step in which a loss had no graph."""


class ModuleStage(StageModel):
    """One step's passes through this rank's virtual stages.

    Operations are cast to `autocast`, if it is given; gradients are taken of the loss times `scale`. With keys of
    `labels`, `kept` has, by micro-batch, what the model returned, without its graph, and the batch's labels.
    """

    def __init__(
        self,
        runner: StepRunner,
        micro_batches: Sequence[Batch],
        specialized: Sequence[Specialization],
        loss_fn: LossFunction,
        *,
        autocast: torch.dtype | None = None,
        scale: float | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        self._device = runner.device
        self._stage = runner.stage
        self._stages = runner.stages
        self._last = runner.stages * runner.chunks - 1
        self._micro_batches = micro_batches
        self._specialized = specialized
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._scale = scale
        self._labels = labels
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor | float] = []
        self._detached: list[bool] = []
        self.kept: dict[int, tuple[Any, Batch]] = {}

    @override
    def load(self, micro_batch: int) -> Batch:
        batch = self._micro_batches[micro_batch]
        keys = self._specialized[micro_batch].keys
        if self._last not in keys:  # where the loss may read all of it
            read = {key for of_stage in keys.values() for key in of_stage}
            batch = {key: value for key, value in batch.items() if key in read}
        return {key: _moved(value, self._device) for key, value in batch.items()}

    @override
    def around_pass(self, instruction: Pass) -> AbstractContextManager[object]:
        return nullcontext()  # nothing is set for single micro-batches

    @override
    def add_weight_gradients(self, micro_batch: int, chunk: int) -> None:
        raise ExecutionError(
            f"expected whole backward passes, got the second half of one for micro-batch {micro_batch}",
            hint="plan with split_backward off",
        )

    @override
    def differentiable(self, micro_batch: int, boundary: int) -> Sequence[bool]:
        return [meta.differentiable for meta in self._specialized[micro_batch].boundaries[boundary]]

    @override
    def forward(self, micro_batch: int, chunk: int, received: Sequence[torch.Tensor], data: Batch) -> Any:
        stage = chunk * self._stages + self._stage
        specialized = self._specialized[micro_batch]
        with nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast):
            output = specialized.runs[stage](received, data, self._device)
            if stage == self._last:
                return self._loss(micro_batch, output, data)
        boundary = specialized.boundaries[stage]
        shapes = [tuple(tensor.shape) for tensor in output]
        expected = [meta.shape for meta in boundary]
        if shapes != expected:
            raise ExecutionError(
                f"expected stage {stage} to send tensors of {expected}, got {shapes}",
                hint="a module whose control flow depends on values has to return a tensor like the first it is given",
            )
        return [tensor.to(getattr(torch, meta.dtype)) for tensor, meta in zip(output, boundary, strict=True)]

    def dtypes(self, transfer: SendStart | RecvStart) -> Sequence[torch.dtype]:
        """Types of the tensors of a transfer."""
        crossing = crossing_of(transfer, self._specialized, stage=self._stage, stages=self._stages)
        return [getattr(torch, meta.dtype) for meta in crossing]

    @override
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scale is None else loss * self._scale

    @override
    def totals(self) -> torch.Tensor:
        # The count says what is wrong with a loss, so that all ranks raise (`check_count`).
        if not self._losses:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        losses = torch.stack(self._losses).double()
        numbers = [0.0 if isinstance(count, torch.Tensor) else float(count) for count in self._counts]
        counts = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        for place, count in enumerate(self._counts):
            if isinstance(count, torch.Tensor):
                counts[place] = count
        without_graph = torch.tensor(self._detached, device=self._device) & (losses != 0)
        wrong = ~counts.isfinite() | (counts < 0) | ((counts == 0) & (losses != 0))
        count = counts.masked_fill(without_graph, _NO_GRAPH).masked_fill(wrong, torch.nan).sum()
        return torch.stack([losses.sum(), count])

    def _loss(self, micro_batch: int, output: Any, batch: Batch) -> torch.Tensor:
        result = self._loss_fn(output, batch)
        if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
            raise DataError(
                f"expected the loss function to return the sum of the losses and their number, got "
                f"{type(result).__name__}",
                hint="loss_fn(output, batch) returns (sum, count), so that uneven micro-batches add up exactly",
            )
        loss, count = result
        self._losses.append(loss.detach())
        self._counts.append(count)
        self._detached.append(torch.is_grad_enabled() and not loss.requires_grad)
        if self._labels is not None:
            labels = {key: batch[key] for key in self._labels if key in batch}
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
            self.kept[micro_batch] = detached, labels
        return loss


def check_count(count: float) -> None:
    """Raise DataError for losses that cannot be trained on, which all ranks know of by their summed count."""
    if count == _NO_GRAPH:
        error = DataError(
            "expected a loss that gradients can be taken of, got one without a graph",
            hint="do not call detach() or item() on the loss, nor compute it under no_grad; train some parameters",
        )
    elif math.isfinite(count):
        return
    else:
        error = DataError(
            "expected the loss function to return a finite number of losses, at least 0, and not 0 for a sum that is "
            "not 0; got another",
            hint="loss_fn(output, batch) returns (sum, count)",
        )
    setattr(error, AGREED, True)
    raise error


def _moved(value: Any, device: torch.device) -> Any:
    """A host tensor on the device, through pinned memory: a copy from any other waits for the device's work."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
