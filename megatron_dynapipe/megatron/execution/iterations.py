"""One rank's part in planned iterations, driven by a host's loop (`run.Run`) or step by step (`MegatronPipeline`)."""

from collections.abc import Callable, Sequence

import torch

from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.execution.forward_backward import run_iteration
from megatron_dynapipe.megatron.execution.megatron_stage import ForwardStep
from megatron_dynapipe.megatron.execution.micro_batch_context import MicroBatchContext
from megatron_dynapipe.megatron.execution.step_functions import MakeBatch
from megatron_dynapipe.megatron.execution.warm_up import LENGTH, warm_up
from megatron_dynapipe.runtime import StepRunner, StepTotals
from megatron_dynapipe.runtime.memory import counted_on
from megatron_dynapipe.store.entry import StageEntry


class IterationRunner:
    """Runs this rank's entries of plans.

    Args:
        steps: runs instruction lists.
        settings: those that plans are made with; may be replaced by others of the same layout.
        required: which of a micro-batch's tensors this rank's stage reads.
        make_batch: host tensors to what the step function takes.
        seed: draws dropouts.

    Attributes:
        shape: the shape of the micro-batch whose pass is running; None before the first.
    """

    def __init__(
        self,
        steps: StepRunner,
        settings: PlannerSettings,
        *,
        required: RequiredFields,
        make_batch: MakeBatch,
        seed: int,
    ) -> None:
        self.steps = steps
        self.settings = settings
        self.make_batch = make_batch
        self._required = required
        self._seed = seed
        self._context: MicroBatchContext | None = None
        self.shape: Shape | None = None
        self._has_begun = False

    def run(
        self,
        entry: StageEntry,
        host: Callable[[int], HostMicroBatch],
        models: Sequence[torch.nn.Module],
        forward_step: ForwardStep,
        *,
        longest: Shape,
        forward_only: bool = False,
        force_all_reduce: bool = False,
        on_first_pass: Callable[[], None] = lambda: None,
    ) -> tuple[StepTotals, list[dict[str, torch.Tensor]], torch.Tensor | None]:
        """Run an entry as `run_iteration` does, with the host tensors of the micro-batch of each index.

        `longest` is the shape of the longest samples, for the warm-up before the first training iteration on a GPU;
        `on_first_pass` is called after it.
        """
        context = self.context(models)

        def prepare(instruction: Pass) -> None:
            index = instruction.micro_batch
            virtual_stage = instruction.chunk * self.steps.stages + self.steps.stage
            if self.steps.is_warm and not self._has_begun:
                self._has_begun = True
                on_first_pass()
            micro_batch = entry.micro_batches[index]
            self.shape = micro_batch.shape
            context.begin(entry.iteration, index, micro_batch.recompute[virtual_stage])

        with counted_on(self.settings.memory_limit_bytes):
            return run_iteration(
                self.steps,
                entry.stage_plan,
                models,
                forward_step,
                lambda index: self.make_batch(host(index), self.steps.device),
                prepare=prepare,
                warm_up=lambda: self.warm_up(models, forward_step, iteration=entry.iteration, longest=longest),
                forward_only=forward_only,
                force_all_reduce=force_all_reduce,
                has_idle_replica=0 in entry.totals.micro_batches,
                divides_apart=self.settings.divides_apart,
            )

    def warm_up(
        self, models: Sequence[torch.nn.Module], forward_step: ForwardStep, *, iteration: int, longest: Shape
    ) -> None:
        """Run small micro-batches under each mode of recomputation; gradients are zero afterwards."""
        context = self.context(models)
        self.shape = Shape(1, LENGTH, 0)
        warm_up(
            models,
            self.settings,
            forward_step=forward_step,
            make_batch=lambda host: self.make_batch(host, self.steps.device),
            prepare=lambda mode: context.begin(iteration, 0, mode),
            required=self._required,
            stage=self.steps.stage,
            longest=longest,
            dtype=self.steps.dtype,
        )

    def context(self, models: Sequence[torch.nn.Module]) -> MicroBatchContext:
        """The models' context, made at the first call, which raises ConfigError as it does."""
        if self._context is None:
            equip(models)
            self._context = MicroBatchContext(models, seed=self._seed)
        return self._context
