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
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.network import GLOO_RULES, cuda_rules
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import ModelFamily, Shape
from megatron_dynapipe.data.collate import Collator, SampleReader, SpecialTokens
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.execution.iterations import IterationRunner
from megatron_dynapipe.megatron.execution.step_functions import STEPS, batch_maker, required_fields
from megatron_dynapipe.megatron.execution.transport import open_runner, team_groups
from megatron_dynapipe.megatron.hooks import fused_kernels, repairs
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.store.entry import StageEntry
from megatron_dynapipe.tools.loop_settings import check_models

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
            rules of transfers there, if its settings have none of their own (`core.network`).
        tokens: what collation adds.
        loss_on: which tokens of a GPT's samples count; where targets alone do, its head runs over these alone.
        seed: draws dropouts.
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
        self._models = models
        self._optimizer = optimizer
        self._device = next(models[0].parameters()).device
        self.planner = planner
        self._config = get_model_config(models[0])
        self._check()
        repairs.apply()
        fused_kernels.fuse_adam(optimizer)
        self._configure()
        self._step_function = STEPS[self._family]
        self._control = ControlGroup(timeout_s=timeout_s)
        self._required = required_fields(models)
        self._tokens = tokens
        self._loss_on = loss_on
        dtype = self._config.pipeline_dtype or self._config.params_dtype
        steps = open_runner(
            self._control, planner.settings, device=self._device, dtype=dtype, timeout_s=timeout_s, adds_up=True
        )
        self._runner = IterationRunner(
            steps, planner.settings, required=self._required, make_batch=batch_maker(models), seed=seed
        )
        if planner.settings.context_teams > 1:
            equip(models).channel.teams = team_groups(
                self._control, planner.settings, device=self._device, timeout_s=timeout_s
            )
        self._replica = parallel_state.get_data_parallel_rank()
        self.iteration = first_iteration

    def plan(self, batch: Sequence[Sample], *, forward_only: bool = False) -> IterationPlan:
        """The next step's plan for a global batch; raises as `step`."""
        lengths = global_batch(batch, self._family, self.iteration, loss_on=self._loss_on)
        return self.planner.plan(lengths, self.iteration, forward_only=forward_only)

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
        plan, plan_digest = self._agreed(batch, plan, forward_only=forward_only)
        entry = StageEntry.of(plan, self._replica, self._runner.steps.stage, plan_digest=plan_digest)
        reader = reader_of(batch) if self._required.text else None
        collate = Collator(
            required=self._required,
            reader=reader,
            special=self._tokens,
            loss_on=self._loss_on,
            length_multiple=self.planner.settings.length_multiple,
        )
        self._runner.settings = self.planner.settings
        result, _, _ = self._runner.run(
            entry,
            lambda index: collate(index, entry.micro_batches[index], entry.family),
            self._models,
            self._step_function,
            longest=_longest(plan),
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
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

    def _agreed(
        self, batch: Sequence[Sample], plan: IterationPlan | None, *, forward_only: bool
    ) -> tuple[IterationPlan, str]:
        """The plan to run and its digest, the same on all ranks; raises on all of them where one has none."""
        error: Exception | None = None
        try:
            plan = plan or self.plan(batch, forward_only=forward_only)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        plan_digest = "" if plan is None else digest(plan)
        self._control.start_agreement(error, plan=plan_digest, what=f"iteration {self.iteration}").settle()
        assert plan is not None, "without a plan the agreement raises"
        return plan, plan_digest

    @property
    def _family(self) -> ModelFamily:
        return self.planner.settings.model.family

    @property
    def planner(self) -> Planner:
        """Plans the next steps."""
        return self._planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._planner = planner.under(cuda_rules(os.environ) if self._device.type == "cuda" else GLOO_RULES)

    def _check(self) -> None:
        settings = self.planner.settings
        expected = (settings.data_parallel, settings.tensor_parallel, settings.pipeline_parallel, settings.chunks)
        actual = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            len(self._models),
        )
        if expected != actual:
            raise ConfigError(
                "expected models in the planner's layout of data × tensor × pipeline parallel ranks × chunks "
                f"{' × '.join(map(str, expected))}, got {' × '.join(map(str, actual))}"
            )
        if not self._config.calculate_per_token_loss:
            raise ConfigError(
                "expected a model configuration with calculate_per_token_loss: micro-batches hold different numbers "
                "of tokens"
            )
        check_models(self._models, multiple=self.planner.settings.length_multiple)

    def _configure(self) -> None:
        """Set in the model's configuration what Megatron's training loop sets there."""
        config = self._config
        models = self._models
        config.finalize_model_grads_func = finalize_model_grads
        if self._optimizer is not None:
            config.grad_scale_func = self._optimizer.scale_loss
        if getattr(models[0], "ddp_config").overlap_grad_reduce:  # noqa: B009  (not an attribute nn.Module knows)
            config.no_sync_func = [getattr(model, "no_sync") for model in models]  # noqa: B009  (likewise)


def reader_of(batch: Sequence[Sample]) -> SampleReader:
    """A global batch as the collator reads a dataset."""
    return [(np.asarray(tokens, np.int64), np.asarray(target, np.int64)) for tokens, target in batch]


def global_batch(
    batch: Sequence[Sample], family: ModelFamily, iteration: int, *, loss_on: LossOn = LossOn.EVERYTHING
) -> GlobalBatch:
    """The lengths that a planner looks at; raises DataError for a batch without samples."""
    if not batch:
        raise DataError("expected a batch of at least one sample, got none")
    inputs, targets = (np.array([len(tokens) for tokens in side], np.int32) for side in zip(*batch, strict=True))
    labels = None
    if not family.is_encoder_decoder:
        if loss_on is LossOn.TARGETS:
            labels = np.minimum(targets, np.maximum(inputs + targets - 1, 1))
        inputs = inputs + targets
        targets = np.zeros_like(targets)
    return GlobalBatch.of_lengths(inputs, targets, labels=labels, iteration=iteration)


def _longest(plan: IterationPlan) -> Shape:
    """The shape of a plan's longest samples."""
    shapes = [micro_batch.shape for replica in plan.replicas for micro_batch in replica.micro_batches]
    return Shape(1, max(shape.input_length for shape in shapes), max(shape.target_length for shape in shapes))
