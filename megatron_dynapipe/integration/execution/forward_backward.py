"""Megatron's schedule function with our executor inside: one iteration through the models.

Megatron 0.19's `train_step` and `evaluate` call the schedule with a step function, an iterator and the model chunks;
in return it wants gradients accumulated and finalized and the loss reports of the last stage
(`megatron/core/pipeline_parallel/schedules.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_dynapipe.integration.execution.parameter_gather import gather_parameters
from megatron_dynapipe.integration.execution.stage_handlers import (
    ForwardStep,
    LoadMicroBatch,
    PrepareMicroBatch,
    StageHandlers,
)
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME
from megatron_dynapipe.integration.hooks.timers import without_timers
from megatron_dynapipe.integration.models.shared_weights import reduce_shared_gradients
from megatron_dynapipe.plan.instructions import Backward, Instruction
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.runtime import PipelineExecutor, Trace


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What one iteration gives back: the last stage's loss reports (empty elsewhere) and when instructions ran."""

    losses: list[dict[str, torch.Tensor]]
    trace: Trace


def run_iteration(
    plan: StagePlan,
    executor: PipelineExecutor,
    models: Sequence[torch.nn.Module],
    forward_step: ForwardStep,
    load: LoadMicroBatch,
    *,
    stage: int,
    stages: int,
    prepare: PrepareMicroBatch = lambda _: None,
    forward_only: bool = False,
    force_all_reduce: bool = False,
) -> IterationResult:
    """Run a stage's plan and hand the gradients to Megatron's finalisation.

    `prepare` is called with the micro-batch before each of its passes (`MicroBatchContext.begin`). A replica without
    micro-batches takes part in the reductions with zeros.
    """
    config, groups = get_model_config(models[0]), ProcessGroupCollection.use_mpu_process_groups()
    device = next(models[0].parameters()).device
    with _timed(config.timers, "forward-backward", barrier=config.barrier_with_L1_time):
        reduction = _GradientReduction(
            config,
            models,
            plan.instructions,
            is_first_stage=stage == 0,
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
        )
        stage_handlers = StageHandlers(
            models,
            config,
            forward_step,
            load,
            stage=stage,
            stages=stages,
            context_parallel_size=groups.cp.size(),
            forward_only=forward_only,
            prepare=prepare,
            before_backward=reduction.before_backward,
        )
        with reduction, without_timers(config):
            gather_parameters(models, plan.instructions)
            trace = executor.execute(plan, stage_handlers.table)
        if not forward_only and config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                list(models),
                stage_handlers.tokens.to(torch.int) if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
            reduce_shared_gradients(models)
    losses = stage_handlers.losses
    if stage == stages - 1 and not losses:
        # The loop reduces the last stages' reports over the replicas: one without work must not be missing.
        losses = [{LOSS_NAME: torch.zeros(2, device=device)}]
    return IterationResult(losses, trace)


class _GradientReduction(AbstractContextManager["_GradientReduction"]):
    """Holds back Megatron's overlapped gradient reduction until each chunk's last backward of the iteration.

    The last backward is known from the plan: during it the hooks reduce. Chunks for which they do not are reduced
    once all passes are done: those of a replica without micro-batches, and with `grad_sync_func` (aligned reduction)
    all but the first stage's, as in Megatron's schedules.
    """

    def __init__(
        self,
        config: Any,
        models: Sequence[torch.nn.Module],
        instructions: Sequence[Instruction],
        *,
        is_first_stage: bool,
        forward_only: bool,
        force_all_reduce: bool,
    ) -> None:
        self._models = models
        self._force_all_reduce = force_all_reduce
        self._overlaps = config.no_sync_func is not None and not forward_only
        self._no_sync = _per_chunk(config.no_sync_func, len(models))
        self._last = {i.chunk: i for i in instructions if isinstance(i, Backward)}
        self._reduces_in_backward = config.grad_sync_func is None or is_first_stage
        self._held: dict[int, AbstractContextManager[Any]] = {}

    def __enter__(self) -> Self:
        for chunk, no_sync in enumerate(self._no_sync):
            context = contextlib.nullcontext() if no_sync is None else no_sync()
            context.__enter__()
            self._held[chunk] = context
        return self

    def before_backward(self, instruction: Backward) -> None:
        """Let the chunk's hooks reduce if this is its last backward pass."""
        if self._reduces_in_backward and instruction == self._last[instruction.chunk]:
            self._release(instruction.chunk)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Reductions match by their order, on every replica: the last chunk's first, as backward passes end. What hooks
        # have not begun begins here: all of a replica without passes, and all of Megatron's first batch, in which its
        # hooks only count.
        for chunk in reversed(range(len(self._models))):
            held = chunk in self._held
            if held:
                self._release(chunk)
            if self._overlaps and kind is None:
                self._start(self._models[chunk], held=held)

    def _start(self, model: Any, *, held: bool) -> None:
        has_handles = model.ddp_config.num_distributed_optimizer_instances == 1
        for group in model.bucket_groups:
            if has_handles:
                begun = group.grad_reduce_handle is not None or group.grad_reduce_finished
            else:
                begun = not held or group.is_first_batch
            if not begun:
                group.start_grad_sync(force_all_reduce=self._force_all_reduce)

    def _release(self, chunk: int) -> None:
        self._held.pop(chunk).__exit__(None, None, None)


def _per_chunk(function: Any, chunks: int) -> Sequence[Callable[..., Any] | None]:
    """Megatron gives one function, or a list of one per chunk."""
    return list(function) if isinstance(function, list | tuple) else [function] * chunks


@contextlib.contextmanager
def _timed(timers: Any, name: str, *, barrier: bool) -> Iterator[None]:
    if timers is not None:
        timers(name, log_level=1).start(barrier=barrier)
    yield
    if timers is not None:
        timers(name).stop()
