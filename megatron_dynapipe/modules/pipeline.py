"""Training steps of a divided model: one object, one call per iteration.

part = split_model(model, example_batch, split_points=["h.3"])
pipeline = Pipeline(part, torch.optim.AdamW(part.parameters()), loss_fn)
for batch in batches:
    loss, overflow = pipeline.step(batch)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.modules.checkpoint import load_checkpoint, save_checkpoint
from megatron_dynapipe.modules.gradients import Gradients, Norm
from megatron_dynapipe.modules.handlers import LossFunction
from megatron_dynapipe.modules.inputs import Batch, batch_rows, split_batch
from megatron_dynapipe.modules.loss_scale import LossScale
from megatron_dynapipe.modules.planner import ModulePlanner
from megatron_dynapipe.modules.runner import Outcome, Plan, Runner, Work
from megatron_dynapipe.runtime import Trace

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepResult(NamedTuple):
    """What a step came to, the same on every rank: `loss, overflow = pipeline.step(batch)`.

    Attributes:
        loss: sum over everything / count over everything: a float32 scalar without a graph, on the host.
        overflow: gradients were not finite (fp16), so that no rank changed its weights.
    """

    loss: torch.Tensor
    overflow: bool


class StepOutputs(NamedTuple):
    """A `StepResult` and, for each micro-batch, what the model returned and the batch's labels; both empty but on the
    last stage.
    """

    loss: torch.Tensor
    overflow: bool
    outputs: list[Any]
    labels: list[Batch]


class Pipeline:
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
        loss_scale: of fp16.
        timeout_s: deadline of every transfer.

    Attributes:
        part: as given.
        loss_scale: of fp16, now.
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
        loss_scale: LossScale | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision!r}")
        if micro_batches is not None and micro_batch_size is not None:
            raise ConfigError("expected a number of micro-batches or their size, got both")
        self.part, self._optimizer, self._planner = part, optimizer, planner
        self._micro_batches, self._micro_batch_size = micro_batches, micro_batch_size
        self._max_norm, self._schedule = max_norm, schedule
        self.loss_scale = (loss_scale or LossScale()) if precision == "fp16" else None
        self.norm: Norm | None = None
        self.trace: Trace | None = None
        if tensor_shapes is not None:
            part.use_shapes(tensor_shapes)
        self._gradients = Gradients(part)
        self._runner = Runner(part, loss_fn, autocast=PRECISIONS[precision], timeout_s=timeout_s)

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.part.stage

    @property
    def replica(self) -> int:
        """The replica that this rank is in."""
        return self.part.replica

    def step(self, batch: Any, *, return_outputs: bool = False) -> Any:
        """Run a batch forward and backward, reduce the gradients and update the weights.

        Args:
            batch: this replica's share: the same on every rank of its pipeline. A dict by names of the model's
                arguments, or a tuple or tensor; labels that only the loss reads come with it.
            return_outputs: return a `StepOutputs` instead of a `StepResult`.

        Raises:
            DataError, ConfigError: on every rank alike: a key that the model does not know, a batch that differs
                among the ranks of a pipeline.
        """
        return self._train(lambda: self._divided(batch), keep_outputs=return_outputs)

    def run(self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: bool = False) -> Any:
        """`step` with micro-batches as they are, in the order of passes that a plan says.

        Args:
            micro_batches: of this replica; it may have none.
            plan: of this iteration, as `DynaPipeDataLoader` yields it; None runs them in this pipeline's schedule.
            return_outputs: as in `step`.
        """
        return self._train(lambda: self._given(micro_batches, plan), keep_outputs=return_outputs)

    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: bool = False
    ) -> Any:
        """The loss of a batch, or of micro-batches, without gradients; the part is in evaluation mode meanwhile."""
        training = self.part.training
        self.part.eval()
        try:
            outcome = self._runner.run(
                lambda: (
                    self._divided(batch, forward_only=True) if micro_batches is None else self._given(micro_batches)
                ),
                schedule=self._schedule,
                forward_only=True,
                keep_outputs=return_outputs,
            )
        finally:
            self.part.train(training)
        self.trace = outcome.trace
        return _result(outcome, overflow=False, keep_outputs=return_outputs)

    def save(self, path: str | Path) -> None:
        """Write weights, optimizer state and loss scale into a folder; every rank calls it."""
        save_checkpoint(Path(path), self.part, self._optimizer, self._extra())

    def load(self, path: str | Path) -> None:
        """Go on from a folder that `save` wrote, under whatever number of stages and replicas.

        Raises:
            DataError: there is no such checkpoint, or it lacks a weight.
        """
        extra = load_checkpoint(Path(path), self.part, self._optimizer, self._extra())
        if self.loss_scale is not None:
            self.loss_scale.value, self.loss_scale.good_steps = extra["loss_scale"], int(extra["good_steps"])

    def _extra(self) -> dict[str, float]:
        scale = self.loss_scale
        return {} if scale is None else {"loss_scale": scale.value, "good_steps": scale.good_steps}

    def _train(self, work: Callable[[], Work], *, keep_outputs: bool) -> Any:
        self._gradients.zero()
        scale = None if self.loss_scale is None else self.loss_scale.value
        outcome = self._runner.run(work, schedule=self._schedule, scale=scale, keep_outputs=keep_outputs)
        self.trace = outcome.trace
        self._gradients.reduce(max(outcome.count, 1.0) * (scale or 1.0))
        overflow = self._finish()
        return _result(outcome, overflow=overflow, keep_outputs=keep_outputs)

    def _finish(self) -> bool:
        """Clip and update; whether gradients were not finite under a loss scale."""
        self.norm = None
        if self._max_norm is not None or self.loss_scale is not None:
            self.norm = self._gradients.norm()
        overflow = self.loss_scale is not None and self.norm is not None and not self.norm.is_finite
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=overflow)
        if overflow:
            return True
        if self._max_norm is not None and self.norm is not None:
            self._gradients.clip(self.norm, self._max_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        return False

    def _divided(self, batch: Any, *, forward_only: bool = False) -> Work:
        """A replica's batch as micro-batches."""
        named = self.part.inputs.name(batch)
        if self._planner is not None:
            return Work(*self._planner.share(named, forward_only=forward_only))
        count = self._micro_batches or self.part.stages * self.part.chunks
        if self._micro_batch_size is not None:
            count = -(-batch_rows(named) // self._micro_batch_size)
        return Work(split_batch(named, count), None)

    def _given(self, micro_batches: Sequence[Any], plan: Plan | None = None) -> Work:
        return Work([self.part.inputs.name(batch) for batch in micro_batches], plan)


def _result(outcome: Outcome, *, overflow: bool, keep_outputs: bool) -> StepResult | StepOutputs:
    loss = torch.tensor(outcome.loss, dtype=torch.float32)
    if not keep_outputs:
        return StepResult(loss, overflow)
    return StepOutputs(loss, overflow, list(outcome.outputs), list(outcome.labels))
