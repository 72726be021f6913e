"""Megatron's schedule function with our executor inside: one iteration through the models.

Megatron 0.19's `train_step` and `evaluate` call the schedule with a step function, an iterator and the model chunks;
in return it wants gradients accumulated and finalized and the loss reports of the last stage
(`megatron/core/pipeline_parallel/schedules.py`).
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_dynapipe.core.instructions import Backward, BackwardWeight, Forward, Instruction
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.equip.experts import forget_iteration
from megatron_dynapipe.megatron.execution.megatron_stage import (
    ForwardStep,
    LoadMicroBatch,
    MegatronStage,
    PrepareMicroBatch,
    WeightDone,
)
from megatron_dynapipe.megatron.execution.micro_batch_context import forget_quantised
from megatron_dynapipe.megatron.hooks.timers import without_timers
from megatron_dynapipe.runtime import Step, StepRunner, StepTotals

MakeStage = Callable[..., MegatronStage]
"""Makes a stage from the functions to call around its passes."""


def run_iteration(
    runner: StepRunner,
    plan: StagePlan,
    models: Sequence[torch.nn.Module],
    forward_step: ForwardStep,
    load: LoadMicroBatch,
    *,
    prepare: PrepareMicroBatch = lambda _: None,
    warm_up: Callable[[], None] = lambda: None,
    forward_only: bool = False,
    force_all_reduce: bool = False,
    has_idle_replica: bool = False,
    divides_apart: bool = False,
) -> tuple[StepTotals, list[dict[str, torch.Tensor]], torch.Tensor | None]:
    """Run a plan, and Megatron's finalisation; totals, the last stage's loss reports, and the batch's labels or None.

    Args:
        runner: this rank's.
        plan: this rank's stage's.
        models: this rank's model chunks, wrapped in Megatron's `DistributedDataParallel`.
        forward_step: Megatron's step function.
        load: makes a micro-batch's device tensors.
        prepare: called with each pass before it runs (`MicroBatchContext.begin`).
        warm_up: runs the models before the first training step on a GPU (`warm_up`).
        forward_only: an evaluation.
        force_all_reduce: whole gradients on every replica, also with the distributed optimizer.
        has_idle_replica: some replica has no micro-batches, so that collectives among them run outside of passes.
        divides_apart: one replica may end a chunk's backward passes by a second half where another does not.
    """
    is_last = runner.stage == runner.stages - 1
    make_stage = partial(MegatronStage, models, forward_step, load, plan.instructions, is_last=is_last, prepare=prepare)
    if not forward_only:
        runner.warm_up(lambda: _before_first_list(warm_up, runner, plan, models, make_stage))
    totals, stage = run_passes(
        runner,
        plan,
        models,
        make_stage,
        forward_only=forward_only,
        force_all_reduce=force_all_reduce,
        has_idle_replica=has_idle_replica,
        divides_apart=divides_apart,
    )
    return totals, stage.reports(), stage.labels


def run_passes(
    runner: StepRunner,
    plan: StagePlan,
    models: Sequence[torch.nn.Module],
    make_stage: MakeStage,
    *,
    forward_only: bool,
    force_all_reduce: bool,
    has_idle_replica: bool = False,
    divides_apart: bool = False,
) -> tuple[StepTotals, MegatronStage]:
    """Run a plan as `run_iteration`, with nothing before it: totals, and the stage that has run."""
    config = get_model_config(models[0])
    reduction = _GradientReduction(
        config,
        models,
        plan.instructions,
        is_first_stage=runner.stage == 0,
        forward_only=forward_only,
        force_all_reduce=force_all_reduce,
        at_end=has_idle_replica or (divides_apart and _have_experts_apart(models)),
    )
    gathers = _ParameterGathers(config, models, plan.instructions, at_once=has_idle_replica, forward_only=forward_only)
    stage = make_stage(
        before_forward=gathers.before_forward,
        before_backward=reduction.before_backward,
        during_weights=reduction.during_weights,
        after_weights=reduction.after_weights,
    )
    step = Step(
        plan=plan,
        model=stage,
        forward_only=forward_only,
        around=_passes(config, models, gathers, reduction),
        finish=lambda _: stage.finalize(force_all_reduce=force_all_reduce),
    )
    with _timed(config.timers, "forward-backward", barrier=config.barrier_with_L1_time):
        return runner.run(step), stage


def _have_experts_apart(models: Sequence[Any]) -> bool:
    """Whether gradients of experts are reduced over a communicator of their own.

    A whole backward pass starts reductions on it and on the others' as gradients become ready, a second half as buckets
    are numbered: where one replica ends by the one and another by the other, they would start them in two orders.
    """
    return any(model.expert_parallel_bucket_groups for model in models)


def _before_first_list(
    warm_up: Callable[[], None],
    runner: StepRunner,
    plan: StagePlan,
    models: Sequence[Any],
    make_stage: MakeStage,
) -> None:
    """Warm up, then run the list without the other stages: so its shapes, cut rows and halves have been run before any
    receive is pending, for cuBLAS loads kernels by shape. Nothing of it is left, its gradients neither.
    """
    warm_up()
    equip(models).forget()
    with contextlib.ExitStack() as resources:
        resources.enter_context(without_timers(get_model_config(models[0])))
        for model in models:
            resources.enter_context(model.no_sync())
            resources.callback(model.zero_grad_buffer)
        runner.run_alone(Step(plan=plan, model=make_stage()))
    equip(models).forget()
    forget_iteration(models)


@contextlib.contextmanager
def _passes(
    config: TransformerConfig,
    models: Sequence[torch.nn.Module],
    gathers: "_ParameterGathers",
    reduction: "_GradientReduction",
) -> Iterator[None]:
    """While a list runs."""
    equip(models).forget()
    forget_quantised(models)
    with reduction, without_timers(config):
        gathers.begin()
        yield


class _GradientReduction(AbstractContextManager["_GradientReduction"]):
    """Holds back Megatron's overlapped gradient reduction until each chunk's last backward of the iteration.

    The last backward is known from the plan: during it the hooks reduce; where it is the second half of a divided one,
    bucket groups are reduced here one by one, in the order of their numbers, in which a whole one makes them ready.
    Chunks for which neither does are reduced once all passes are done: all of them if `at_end`, and with
    `grad_sync_func` (aligned reduction) all but the first stage's, as in Megatron's schedules.
    """

    def __init__(
        self,
        config: TransformerConfig,
        models: Sequence[Any],
        instructions: Sequence[Instruction],
        *,
        is_first_stage: bool,
        forward_only: bool,
        force_all_reduce: bool,
        at_end: bool,
    ) -> None:
        self._models = models
        self._force_all_reduce = force_all_reduce
        self._overlaps = config.no_sync_func is not None and not forward_only
        self._no_sync = _per_chunk(config.no_sync_func, len(models))
        self._last = {i.chunk: i for i in instructions if isinstance(i, Backward | BackwardWeight)}
        self._reduces_in_backward = (config.grad_sync_func is None or is_first_stage) and not at_end
        self._held: dict[int, AbstractContextManager[Any]] = {}

    def __enter__(self) -> Self:
        for chunk, no_sync in enumerate(self._no_sync):
            context = contextlib.nullcontext() if no_sync is None else no_sync()
            context.__enter__()
            self._held[chunk] = context
        return self

    def before_backward(self, instruction: Backward) -> None:
        """Let the chunk's hooks reduce if this is its last backward pass."""
        if self._may_release(instruction):
            self._release(instruction.chunk)

    def during_weights(self, instruction: BackwardWeight) -> WeightDone | None:
        """The function that reduces bucket groups while this half runs, if it is the chunk's last."""
        model = self._models[instruction.chunk]
        has_handles = model.ddp_config.num_distributed_optimizer_instances == 1
        if not (self._overlaps and has_handles and self._may_release(instruction)):
            return None
        return partial(self._start, model, held_back=True)

    def after_weights(self, instruction: BackwardWeight) -> None:
        """Reduce the rest of the chunk's gradients if this was the last of its backward passes' halves."""
        if self._may_release(instruction):
            self._release(instruction.chunk)
            if self._overlaps:
                self._start(self._models[instruction.chunk], held_back=True)

    def _may_release(self, instruction: Backward | BackwardWeight) -> bool:
        """Whether it ends its chunk's backward passes, and later chunks' have ended: replicas reduce in one order."""
        later = range(instruction.chunk + 1, len(self._models))
        ends = instruction == self._last[instruction.chunk] and not any(chunk in self._held for chunk in later)
        return self._reduces_in_backward and ends

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Reductions match by their order, on every replica: the last chunk's first, as backward passes end. What hooks
        # have not begun begins here: all of a replica without passes, and all of Megatron's first batch, in which its
        # hooks only count.
        for chunk in reversed(range(len(self._models))):
            held_back = chunk in self._held
            if held_back:
                self._release(chunk)
            if self._overlaps and kind is None:
                self._start(self._models[chunk], held_back=held_back)

    def _start(self, model: Any, pending: Collection[torch.Tensor] = (), *, held_back: bool) -> None:
        """Start what has not begun, up to the first bucket group with a gradient that is still to come."""
        has_handles = model.ddp_config.num_distributed_optimizer_instances == 1
        for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
            if pending and not group.params.isdisjoint(pending):
                return
            if has_handles:
                begun = group.grad_reduce_handle is not None or group.grad_reduce_finished
            else:
                begun = not held_back or group.is_first_batch
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


class _ParameterGathers:
    """Joins the all-gathers of parameters that Megatron's hooks do not start in time, or not at all.

    With `--overlap-param-gather` a rank joins the all-gather of a bucket when the first module that uses it runs, and
    starts the next bucket's. A replica without micro-batches would never join, so that where there is one
    (`at_once`) all join all of them before their passes, in one order. And hooks start no bucket ahead where gathers
    are aligned over stages (`--align-param-gather`, the default with virtual stages): Megatron's schedules do, by
    `param_sync_func`. Here the next chunk's are started before each chunk's first forward pass: with one hardware queue
    any earlier start would stand before it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        models: Sequence[Any],
        instructions: Sequence[Instruction],
        *,
        at_once: bool,
        forward_only: bool,
    ) -> None:
        self._models = models
        run = {instruction.chunk for instruction in instructions if isinstance(instruction, Forward)}
        self._at_once = [chunk for chunk in range(len(models)) if at_once or chunk not in run]
        ahead = config.param_sync_func is not None and not forward_only and not self._at_once
        self._starts = _per_chunk(config.param_sync_func if ahead else None, len(models))
        self._started = 0

    def begin(self) -> None:
        """Join, or start, what comes before the passes."""
        for chunk in self._at_once:
            model = self._models[chunk]
            if _gathers_in_forward_passes(model):
                # Buckets are filled from the model's end; a forward pass begins at its start.
                for group in reversed(model.bucket_groups):
                    group.finish_param_sync()
        self._start_up_to(0)

    def before_forward(self, instruction: Forward) -> None:
        """Start the gathers of the chunk that runs next."""
        self._start_up_to(instruction.chunk + 1)

    def _start_up_to(self, chunk: int) -> None:
        while self._started < min(chunk + 1, len(self._models)):
            start = self._starts[self._started]
            model = self._models[self._started]
            if start is not None and _gathers_in_forward_passes(model):
                start(model.parameters())
            self._started += 1


def _gathers_in_forward_passes(model: torch.nn.Module) -> bool:
    """Whether hooks are on: they are off in a run's first iteration and while it evaluates."""
    return bool(getattr(model, "use_forward_hook", False) and getattr(model, "remove_forward_pre_hook_handles", None))
