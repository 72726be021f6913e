"""Planned training steps without Megatron's loop: one object, one call per iteration.

    pipeline = MegatronPipeline(models, optimizer, planner)
    for batch in batches:                     # the whole global batch, the same on every rank
        result = pipeline.step(batch)         # plans, runs, reduces, updates
        print(result.loss, result.overflowed)

`examples/gpt_steps.py` is a complete run. Every rank plans for itself, in process: a plan is a pure function of the
batch's lengths, so all ranks come to the same one, and no store or planner process is needed. Training with Megatron's
loop plans ahead instead, in a process of its own (`session`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config, unwrap_model

from megatron_dynapipe.data.collate import Collator, RequiredFields, SpecialTokens
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.integration.execution.forward_backward import run_iteration
from megatron_dynapipe.integration.execution.micro_batch_context import MicroBatchContext
from megatron_dynapipe.integration.execution.step_functions import gpt_batch, gpt_step, t5_batch, t5_step
from megatron_dynapipe.integration.execution.transport import open_runner
from megatron_dynapipe.integration.execution.warm_up import warm_up
from megatron_dynapipe.integration.hooks import fused_kernels, optimizer_patches
from megatron_dynapipe.integration.models.packed_rows import RowFormat
from megatron_dynapipe.integration.models.providers import t5_required_fields
from megatron_dynapipe.integration.models.specs import packing_obstacle
from megatron_dynapipe.integration.models.t5_stage import T5Stage
from megatron_dynapipe.plan.codec import digest
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.transfer_rules import GLOO_RULES, cuda_rules
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, ModelFamily, Shape

Sample = tuple[Sequence[int], Sequence[int]]
"""Tokens of an input and of its target; a decoder-only model is trained on one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens that collation adds: pad, start of a decoder's input, end of a target."""

    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one iteration, the same on every rank except for the trace.

    Attributes:
        loss: mean over the target tokens of the global batch.
        tokens: their number.
        overflowed: the gradients were not finite (fp16), so that no rank changed its weights.
        gradient_norm: before clipping; None where nothing was computed: evaluation, overflow.
        plan: what was run.
        trace: when this rank's instructions ran.
    """

    loss: float
    tokens: int
    overflowed: bool
    gradient_norm: float | None
    plan: IterationPlan
    trace: Trace


class MegatronPipeline:
    """One rank's part in planned training steps.

    Make it on every rank, after Megatron's `initialize_model_parallel`; it makes process groups.

    Args:
        models: this rank's model chunks, each wrapped in Megatron's `DistributedDataParallel`.
        optimizer: Megatron's, from `get_megatron_optimizer`; None to accumulate gradients or evaluate only.
        planner: plans; its settings say what the model is and how it is laid out. On a GPU its plans are made under the
            rules of transfers there, if its settings have none of their own (`plan.transfer_rules`).
        tokens: what collation adds.
        loss_on: which tokens of a GPT's samples count; where targets alone do, its head runs over these alone.
        seed: of dropouts.
        first_iteration: number of the first step, for a run that is resumed.
        timeout_s: deadline of every transfer.

    Attributes:
        iteration: number of the next step.
        planner: plans the next steps; may be replaced, on all ranks, by one of the same layout with other costs.

    Raises:
        ConfigError: the planner's layout is not that of the models, or the configuration has no per-token loss.
        UnsupportedMegatronError: Megatron is not of a known version.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizer: Any,
        planner: Planner,
        *,
        tokens: SpecialTokens = Tokens(),
        loss_on: LossOn = LossOn.EVERYTHING,
        seed: int = 0,
        first_iteration: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self._models, self._optimizer = models, optimizer
        self._device = next(models[0].parameters()).device
        self.planner = planner
        self._config = get_model_config(models[0])
        self._dtype = self._config.pipeline_dtype or self._config.params_dtype
        self._check()
        optimizer_patches.apply()
        fused_kernels.fuse_adam(optimizer)
        self._control = ControlGroup(timeout_s=timeout_s)
        self._runner = open_runner(
            self._control, planner.settings, device=self._device, dtype=self._dtype, timeout_s=timeout_s, adds_up=True
        )
        self._replica = parallel_state.get_data_parallel_rank()
        self._state = MicroBatchContext(models, seed=seed)
        self._required, self._tokens, self._loss_on = required_fields_of(models), tokens, loss_on
        self.iteration = first_iteration
        self._configure()

    def plan(self, batch: Sequence[Sample], *, forward_only: bool = False) -> IterationPlan:
        """The next step's plan for a global batch; raises as `step`."""
        return self.planner.plan(
            global_batch(batch, self._family, self.iteration), self.iteration, forward_only=forward_only
        )

    def step(self, batch: Sequence[Sample], plan: IterationPlan | None = None) -> StepReport:
        """Plan a global batch, run it, reduce the gradients and update the weights.

        Args:
            batch: every sample of the iteration, the same on all ranks.
            plan: made by `plan` of this batch before, on all ranks; None plans now.

        Raises:
            ConfigError: there is no optimizer.
            DataError: there is no sample, or an empty input.
            PlanningError: the batch cannot be planned; the message says why.
        """
        if self._optimizer is None:
            raise ConfigError("expected an optimizer to step with, got none", hint="give MegatronPipeline an optimizer")
        for model in self._models:
            model.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        self._optimizer.zero_grad()
        result = self.run(batch, plan)
        updated, norm, _ = self._optimizer.step()
        return replace(result, overflowed=not updated, gradient_norm=None if norm is None else float(norm))

    def evaluate(self, batch: Sequence[Sample]) -> StepReport:
        """The loss of a global batch, without gradients; the models are in evaluation mode meanwhile."""
        for model in self._models:
            model.eval()
        try:
            with torch.no_grad():
                return self.run(batch, forward_only=True)
        finally:
            for model in self._models:
                model.train()

    def run(
        self,
        batch: Sequence[Sample],
        plan: IterationPlan | None = None,
        *,
        forward_only: bool = False,
        force_all_reduce: bool = False,
    ) -> StepReport:
        """Plan and run a global batch; gradients are added to the models' buffers, reduced and divided by tokens.

        Args:
            batch: every sample of the iteration, the same on all ranks.
            plan: as in `step`.
            forward_only: no backward passes.
            force_all_reduce: whole gradients on every replica, also with the distributed optimizer.
        """
        plan = self._agreed(batch, plan, forward_only=forward_only)
        replica = plan.replicas[self._replica]
        collate = Collator(required=self._required, reader=_Reader(batch), special=self._tokens, loss_on=self._loss_on)

        def prepare(index: int) -> None:
            planned = replica.micro_batches[index]
            self._state.begin(plan.iteration, index, planned.recompute, planned)

        result, _, _ = run_iteration(
            self._runner,
            replica.stages[self._runner.stage],
            self._models,
            self._step_function,
            lambda index: self._make_batch(collate(index, replica.micro_batches[index], self._family), self._device),
            prepare=prepare,
            warm_up=lambda: self.warm_up(plan),
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
            has_idle_replica=not all(replica.micro_batches for replica in plan.replicas),
            divides_apart=self.planner.settings.divides_apart,
        )
        if not forward_only:
            self.iteration += 1
        return StepReport(
            loss=result.mean_loss,
            tokens=int(result.count),
            overflowed=False,
            gradient_norm=None,
            plan=plan,
            trace=result.trace,
        )

    def _agreed(self, batch: Sequence[Sample], plan: IterationPlan | None, *, forward_only: bool) -> IterationPlan:
        """The plan to run, the same on all ranks; raises on all of them where one has none."""
        error: Exception | None = None
        try:
            plan = plan or self.plan(batch, forward_only=forward_only)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        identity = "" if plan is None else digest(plan)
        self._control.start_agreement(error, plan=identity, what=f"iteration {self.iteration}").settle()
        assert plan is not None, "without a plan the agreement raises"
        return plan

    def warm_up(self, plan: IterationPlan) -> None:
        """Run a small micro-batch under each mode of recomputation, so that no list meets a kernel not yet loaded.

        The first training step on a GPU does it. Gradients are zero afterwards.

        Args:
            plan: whose longest samples the models take.
        """
        shapes = [micro_batch.shape for replica in plan.replicas for micro_batch in replica.micro_batches]
        warm_up(
            self._models,
            self.planner.settings,
            forward_step=self._step_function,
            make_batch=lambda host: self._make_batch(host, self._device),
            prepare=lambda mode: self._state.begin(plan.iteration, 0, mode),
            required=self._required,
            stage=self._runner.stage,
            longest=Shape(1, max(s.input_length for s in shapes), max(s.target_length for s in shapes)),
            dtype=self._dtype,
        )
        self._runner.is_warm = True

    @property
    def _family(self) -> ModelFamily:
        return self.planner.settings.family

    @property
    def planner(self) -> Planner:
        """Plans the next steps."""
        return self._planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._planner = planner.under(cuda_rules(os.environ) if self._device.type == "cuda" else GLOO_RULES)

    def _check(self) -> None:
        settings = self.planner.settings
        wanted = (settings.data_parallel, settings.tensor_parallel, settings.pipeline_parallel, settings.chunks)
        there = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            len(self._models),
        )
        if wanted != there:
            raise ConfigError(
                "expected models in the planner's layout of data × tensor × pipeline parallel ranks × chunks "
                f"{' × '.join(map(str, wanted))}, got {' × '.join(map(str, there))}"
            )
        if not self._config.calculate_per_token_loss:
            raise ConfigError(
                "expected a model configuration with calculate_per_token_loss: micro-batches hold different numbers "
                "of tokens"
            )
        if self._config.fp8 or self._config.fp4:
            raise ConfigError(
                "expected a model configuration without fp8 and fp4: their scales are agreed on in every pass, and "
                "replicas have different numbers of passes",
                hint="train in bf16",
            )
        if BatchLayout.PACKED in settings.micro_batch_layouts and (obstacle := packing_obstacle(self._models)):
            raise ConfigError(
                f"expected models that take packed rows, got {obstacle}",
                hint="plan with micro_batch_layouts=(BatchLayout.PADDED,)",
            )

    def _configure(self) -> None:
        """What Megatron's training loop sets in the model's configuration."""
        config, models = self._config, self._models
        gpt = self._family is ModelFamily.GPT
        made = partial(gpt_batch, explicit_mask=takes_mask(models)) if gpt else t5_batch
        self._make_batch = partial(made, row_format=RowFormat.of(models))
        self._step_function = gpt_step if gpt else t5_step
        config.finalize_model_grads_func = finalize_model_grads
        if self._optimizer is not None:
            config.grad_scale_func = self._optimizer.scale_loss
        if getattr(models[0], "ddp_config").overlap_grad_reduce:  # noqa: B009  (not an attribute nn.Module knows)
            config.no_sync_func = [getattr(model, "no_sync") for model in models]  # noqa: B009  (likewise)


class _Reader:
    """A global batch as the collator reads a dataset."""

    def __init__(self, batch: Sequence[Sample]) -> None:
        self._batch = batch

    def __getitem__(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        given, wanted = self._batch[sample]
        return np.asarray(given, np.int64), np.asarray(wanted, np.int64)


def global_batch(batch: Sequence[Sample], family: ModelFamily, iteration: int) -> GlobalBatch:
    """The lengths that a planner looks at; raises DataError for a batch without samples."""
    if not batch:
        raise DataError("expected a batch of at least one sample, got none")
    inputs = np.array([len(given) for given, _ in batch], np.int32)
    targets = np.array([len(wanted) for _, wanted in batch], np.int32)
    if family is ModelFamily.GPT:
        inputs, targets = inputs + targets, np.zeros_like(targets)
    return GlobalBatch(
        iteration=iteration, sample_ids=np.arange(len(batch)), input_lengths=inputs, target_lengths=targets
    )


def takes_mask(models: Sequence[torch.nn.Module]) -> bool:
    """Whether a GPT's attention needs a causal mask: only Megatron's unfused one does."""
    return any(isinstance(module, DotProductAttention) for model in models for module in model.modules())


def required_fields_of(models: Sequence[torch.nn.Module]) -> RequiredFields:
    """Which of a micro-batch's tensors these model chunks read."""
    chunks = unwrap_model(list(models))
    stages = [chunk.layers for chunk in chunks if isinstance(chunk, T5Stage)]
    if stages:
        return t5_required_fields(stages)
    return RequiredFields(
        tokens=any(chunk.pre_process for chunk in chunks),
        labels=any(chunk.post_process for chunk in chunks),
        rows_alone=True,
    )
