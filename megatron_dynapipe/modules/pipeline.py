"""Training steps of a divided model: one object, one call per iteration.

part = split_model(model, example_batch, split_points=["h.3"])
pipeline = Pipeline(part, torch.optim.AdamW(part.parameters()), loss_fn)
for batch in batches:
    loss, overflow = pipeline.step(batch)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.modules.checkpoint import load_checkpoint, save_checkpoint
from megatron_dynapipe.modules.inputs import batch_rows, split_batch
from megatron_dynapipe.modules.loader import ModulePlanner
from megatron_dynapipe.modules.runner import LossFunction
from megatron_dynapipe.modules.steps import ModuleSteps, Plan, StepOutputs, StepResult, StepWork

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Pipeline(ModuleSteps):
    """One rank's part in training steps. Every rank makes it at the same point: it makes process groups.

    Args:
        part: from `split_model`, or a `Stage`.
        optimizer: over `part.parameters()`; None leaves the gradients where they are.
        loss_fn: `loss_fn(output, batch) → (sum, count)`, called on the last stage with each micro-batch.
        planner: divides what `step` is given into micro-batches and orders their passes; see `ModulePlanner.share`.
        micro_batches: how many `step` makes of a batch without a planner; by default as many as there are stages.
        micro_batch_size: or of how many samples at most.
        precision: "fp32", or autocast to "bf16" or "fp16", with weights in fp32 and fp16's loss scaled.
        max_norm: gradients are scaled so that their norm over all stages is at most this.
        schedule: order of passes without a plan: "1f1b", "gpipe" or "adaptive".
        tensor_shapes: shapes of the tensors at every boundary of a `Stage`, or a function from a micro-batch to them;
            without them, stages exchange theirs once for every new shape of a micro-batch.
        loss_scale: of fp16; by default `torch.amp.GradScaler("cpu")`, whose state lives on the host.
        timeout_s: deadline of every transfer.

    Attributes:
        part: as given.
        loss_scale: of fp16; None without.
        norm: of the last step's gradients before clipping; None where nothing asked for it.
        trace: when the last iteration's instructions ran on this rank.
    """

    def __init__(
        self,
        part: Part,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: LossFunction,
        *,
        planner: ModulePlanner | None = None,
        micro_batches: int | None = None,
        micro_batch_size: int | None = None,
        precision: str = "fp32",
        max_norm: float | None = None,
        schedule: str = "1f1b",
        tensor_shapes: Any = None,
        loss_scale: GradScaler | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision!r}")
        if micro_batches is not None and micro_batch_size is not None:
            raise ConfigError("expected a number of micro-batches or their size, got both")
        self._planner, self._micro_batches, self._micro_batch_size = planner, micro_batches, micro_batch_size
        if tensor_shapes is not None:
            part.use_shapes(tensor_shapes)
        self.loss_scale = (loss_scale or GradScaler("cpu")) if precision == "fp16" else None
        super().__init__(
            part,
            optimizer,
            loss_fn,
            autocast=PRECISIONS[precision],
            loss_scale=self.loss_scale,
            max_norm=max_norm,
            schedule=schedule,
            timeout_s=timeout_s,
        )

    @overload
    def step(self, batch: Any, *, return_outputs: Literal[False] = False) -> StepResult: ...
    @overload
    def step(self, batch: Any, *, return_outputs: Literal[True]) -> StepOutputs: ...
    def step(self, batch: Any, *, return_outputs: bool = False) -> StepResult | StepOutputs:
        """Run a batch forward and backward, reduce the gradients and update the weights.

        Args:
            batch: this replica's share: the same on every rank of its pipeline. A dict by names of the model's
                arguments, or a tuple or tensor; labels that only the loss reads come with it.
            return_outputs: return a `StepOutputs` instead of a `StepResult`.

        Raises:
            DataError, ConfigError: on every rank alike: a key that the model does not know, no samples, tensors
                inside lists or dicts, a batch that differs among the ranks of a pipeline (values on the host are
                compared in the first steps and then in some), a loss without a graph, a count that cannot be one.
        """
        return self._train(lambda: self._divided(batch), keep_outputs=return_outputs)

    @overload
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: Literal[False] = False
    ) -> StepResult: ...
    @overload
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: Literal[True]
    ) -> StepOutputs: ...
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: bool = False
    ) -> StepResult | StepOutputs:
        """`step` with micro-batches as they are, in the order of passes that a plan says.

        Args:
            micro_batches: of this replica; it may have none.
            plan: of this iteration, as `DynaPipeDataLoader` yields it; None runs them in this pipeline's schedule.
            return_outputs: as in `step`.
        """
        return self._train(lambda: self._given(micro_batches, plan), keep_outputs=return_outputs)

    @overload
    def evaluate(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        return_outputs: Literal[False] = False,
    ) -> StepResult: ...
    @overload
    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: Literal[True]
    ) -> StepOutputs: ...
    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: bool = False
    ) -> StepResult | StepOutputs:
        """The loss of a batch, or of micro-batches, without gradients; the part is in evaluation mode meanwhile."""

        def work() -> StepWork:
            return self._divided(batch, forward_only=True) if micro_batches is None else self._given(micro_batches)

        return self._evaluate(work, keep_outputs=return_outputs)

    def save(self, path: str | Path) -> None:
        """Write weights, optimizer state and loss scale into a folder; every rank calls it."""
        save_checkpoint(Path(path), self.part, self._optimizer, self._extra())

    def load(self, path: str | Path) -> None:
        """Go on from a folder that `save` wrote, under whatever number of stages and replicas.

        Raises:
            DataError: there is no such checkpoint, or it lacks a weight.
        """
        extra = load_checkpoint(Path(path), self.part, self._optimizer, self._extra())
        if self._scale is not None:
            self._scale.load(extra)

    def _extra(self) -> dict[str, float]:
        return {} if self._scale is None else self._scale.state()

    def _divided(self, batch: Any, *, forward_only: bool = False) -> StepWork:
        """A replica's batch as micro-batches."""
        named = self.part.inputs.name(batch)
        if self._planner is not None:
            return StepWork(*self._planner.share(named, forward_only=forward_only))
        count = self._micro_batches or self.part.stages * self.part.chunks
        if self._micro_batch_size is not None:
            count = -(-batch_rows(named) // self._micro_batch_size)
        return StepWork(split_batch(named, count), None)

    def _given(self, micro_batches: Sequence[Any], plan: Plan | None = None) -> StepWork:
        return StepWork([self.part.inputs.name(batch) for batch in micro_batches], plan)
