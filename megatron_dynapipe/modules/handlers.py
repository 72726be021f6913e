"""The stage handlers of plain PyTorch: load a micro-batch, run a virtual stage forward, run it backward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.modules.boundary import Layout, Part
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.plan.instructions import Backward, Buffer, Forward, Load
from megatron_dynapipe.runtime import BufferTable, Entry, Handlers, StageGraph

LossFunction = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor | float]]
"""From a model's output and the micro-batch to the sum of the losses and their number."""


class StageHandlers:
    """One iteration's passes through this rank's virtual stages.

    Args:
        part: of the model.
        micro_batches: on the host or the device.
        layouts: of each.
        loss_fn: called on the last stage.
        autocast: dtype that operations are cast to, if any.
        scale: factor of the loss that gradients are taken of.
        forward_only: nothing is kept for a backward pass.
        keep_outputs: keep what the model returns, without its graph, and the labels that go with it.

    Attributes:
        kept: by micro-batch, what the model returned and the batch's labels, if they are kept.
    """

    def __init__(
        self,
        part: Part,
        micro_batches: Sequence[Batch],
        layouts: Sequence[Layout],
        loss_fn: LossFunction,
        *,
        autocast: torch.dtype | None = None,
        scale: float | None = None,
        forward_only: bool = False,
        keep_outputs: bool = False,
    ) -> None:
        self._part, self._micro_batches, self._layouts = part, micro_batches, layouts
        self._loss_fn = loss_fn
        self._scaled = None if scale is None else partial(torch.mul, scale)
        self._autocast = autocast
        self._forward_only, self._keep_outputs = forward_only, keep_outputs
        self._device, self._stage, self._stages, self._last = part.device, part.stage, part.stages, part.last
        self._graphs: dict[tuple[int, int], StageGraph] = {}
        self._losses_to_come = len(micro_batches) if part.stage == part.stages - 1 else 0
        self._when_totalled: Callable[[torch.Tensor], None] | None = None
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor | float] = []
        self.kept: dict[int, tuple[Any, Batch]] = {}

    @property
    def table(self) -> Handlers:
        """For the executor."""
        return {Load: self.load, Forward: self.forward, Backward: self.backward}

    @property
    def totals(self) -> torch.Tensor:
        """Sum of the losses and their number so far: float64[2], zeros but on the last stage."""
        if not self._losses:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        count = torch.as_tensor(sum(self._counts), dtype=torch.float64, device=self._device)
        return torch.stack([torch.stack(self._losses).sum(dtype=torch.float64), count])

    def when_totalled(self, function: Callable[[torch.Tensor], None]) -> None:
        """Call a function with the totals once no more losses come."""
        self._when_totalled = function
        self._tell()

    def _tell(self) -> None:
        if self._when_totalled is not None and not self._losses_to_come:
            self._when_totalled(self.totals)

    def load(self, instruction: Load, buffers: BufferTable) -> None:
        """Bring what this rank reads of a micro-batch to the device; on the last stage the loss may read all of it."""
        batch, layout = self._micro_batches[instruction.micro_batch], self._layouts[instruction.micro_batch]
        if self._last not in layout.keys:
            wanted = {key for keys in layout.keys.values() for key in keys}
            batch = {key: value for key, value in batch.items() if key in wanted}
        buffers.put(Buffer.DATA, instruction.micro_batch, 0, {k: _moved(v, self._device) for k, v in batch.items()})

    def forward(self, instruction: Forward, buffers: BufferTable) -> None:
        """Run a virtual stage."""
        row, chunk = instruction.micro_batch, instruction.chunk
        stage, layout = self._virtual(chunk), self._layouts[row]
        received = buffers.tensors(Buffer.INPUT, row, chunk) if stage else ()
        batch = buffers.get(Buffer.DATA, row, 0)
        with torch.set_grad_enabled(not self._forward_only):
            entry = Entry(received, layout.boundaries[stage - 1].differentiable if stage else ())
            with self._casting():
                output = layout.runs[stage](entry.tensors, batch, self._device)
                if stage == self._last:
                    graph = StageGraph.to_loss(entry, self._loss(row, output, batch))
            if stage != self._last:
                boundary = layout.boundaries[stage]
                output = [t if t.dtype is d else t.to(d) for t, d in zip(output, boundary.dtypes, strict=True)]
                buffers.put(Buffer.OUTPUT, row, chunk, [tensor.detach().contiguous() for tensor in output])
                wanted = [t for t, wants in zip(output, boundary.differentiable, strict=True) if wants]
                graph = StageGraph.to_outputs(entry, wanted)
        if not self._forward_only:
            self._graphs[row, chunk] = graph

    def backward(self, instruction: Backward, buffers: BufferTable) -> None:
        """Run a virtual stage's backward pass."""
        row, chunk = instruction.micro_batch, instruction.chunk
        stage = self._virtual(chunk)
        gradients = buffers.tensors(Buffer.OUTPUT_GRAD, row, chunk) if stage != self._last else ()
        made = self._graphs.pop((row, chunk)).backward(gradients, scale=self._scaled)
        if stage:
            buffers.put(Buffer.INPUT_GRAD, row, chunk, [gradient.contiguous() for gradient in made])

    def _loss(self, row: int, output: Any, batch: Batch) -> torch.Tensor:
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
        self._losses_to_come -= 1
        self._tell()
        if self._keep_outputs:
            labels = {key: batch[key] for key in self._part.inputs.labels if key in batch}
            self.kept[row] = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output), labels
        return loss

    def _casting(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def _virtual(self, chunk: int) -> int:
        return chunk * self._stages + self._stage


def _moved(value: Any, device: torch.device) -> Any:
    """A host tensor on the device, through pinned memory: a copy from any other waits for the device's work."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)
