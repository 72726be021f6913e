"""Megatron's model chunks as the stage that a step runs.

Megatron's own `forward_step` and `backward_step` assume one tensor per stage boundary; a T5's decoder stages pass two.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Pass
from megatron_dynapipe.megatron.equip.equipped import Equipped, equip
from megatron_dynapipe.megatron.equip.experts import finish_iteration
from megatron_dynapipe.megatron.equip.told import NOTHING, Told
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
from megatron_dynapipe.megatron.hooks.spans import pass_span
from megatron_dynapipe.megatron.models.shared_weights import reduce_shared_gradients

DeviceBatch = Mapping[str, Any]
"""The value that a step function takes from its iterator for one micro-batch."""
LoadMicroBatch = Callable[[int], DeviceBatch]
"""Makes the device tensors of the micro-batch of that index."""
PrepareMicroBatch = Callable[[Pass], None]
"""Called with the index of the micro-batch that runs next."""
ForwardStep = Callable[[Iterator[DeviceBatch], torch.nn.Module], tuple[Any, Callable[..., Any]]]
"""Megatron's step function: takes one batch, returns the model's output and the loss function for it."""

WeightDone = Callable[[Collection[torch.Tensor]], None]
"""Called after a weight's gradient has been added, with the weights of this second half that are still to come."""


class MegatronStage:
    """One step's passes through this rank's model chunks; see `runtime.StageModel`.

    Args:
        models: one (wrapped) model per chunk of this rank; the timers of their configuration must be off
            (`hooks.timers`).
        forward_step: Megatron's step function.
        load: makes a micro-batch's device tensors.
        instructions: the list that runs, which says how many micro-batches there are, by which Megatron divides a
            loss that is not one per token, and which backward passes run in halves.
        is_last: whether this rank's last chunk ends the pipeline.
        equips: whether the models are given what planned rows, pieces and halves need; a step function with batches of
            its own needs none of it, and gets back what its loss function reports as it is.
        collect_non_loss_data: as Megatron's schedule functions take it.
        prepare: called with each pass before it runs (`MicroBatchContext.begin`).
        before_forward: called with each forward pass before it runs (gathers of parameters).
        before_backward: called with each whole backward pass before it runs (overlapped gradient reduction).
        during_weights: called with each second half of a divided one before it runs; what it gives is called after each
            weight with those still to come. `after_weights` is called after it.

    Attributes:
        labels: the global batch's, once Megatron's finalisation has counted them; else None.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        forward_step: ForwardStep,
        load: LoadMicroBatch,
        instructions: Sequence[Instruction] = (),
        *,
        is_last: bool,
        equips: bool = True,
        collect_non_loss_data: bool = False,
        prepare: PrepareMicroBatch = lambda _: None,
        before_forward: Callable[[Forward], None] = lambda _: None,
        before_backward: Callable[[Backward], None] = lambda _: None,
        during_weights: Callable[[BackwardWeight], WeightDone | None] = lambda _: None,
        after_weights: Callable[[BackwardWeight], None] = lambda _: None,
    ) -> None:
        self.load = load
        self._models = models
        self._config = get_model_config(models[0])
        self._forward_step = forward_step
        self._is_last = is_last
        self._micro_batches = max(len({i.micro_batch for i in instructions if isinstance(i, Forward)}), 1)
        self._equips = equips
        self._collects = collect_non_loss_data
        self._prepare = prepare
        self._before_forward = before_forward
        self._before_backward = before_backward
        self._during_weights = during_weights
        self._after_weights = after_weights
        self._divided = {(i.micro_batch, i.chunk) for i in instructions if isinstance(i, BackwardInput)}
        self._equipped = equip(models) if equips else Equipped(())
        self._halves = self._equipped.halves
        self._halves.clear()
        self._told: dict[int, Told] = {}  # by micro-batch, for its backward passes
        self._groups = self._equipped.groups
        self._device = next(models[0].parameters()).device
        self._losses: list[dict[str, torch.Tensor]] = []
        # On the device from the start: moving it there later would wait for all passes.
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self.labels: torch.Tensor | None = None

    def around_pass(self, instruction: Pass) -> AbstractContextManager[object]:
        """Set recomputation and the random state; start the collectives among replicas that are due."""
        self._prepare(instruction)
        key = instruction.micro_batch, instruction.chunk
        self._halves.key = key if key in self._divided else None
        self._equipped.tell(self._told.get(instruction.micro_batch, NOTHING))  # for what is computed again
        if isinstance(instruction, Backward):
            if instruction.chunk == 0:  # the last pass here that computes anything again
                self._told.pop(instruction.micro_batch, None)
            self._before_backward(instruction)
        elif isinstance(instruction, Forward):
            self._before_forward(instruction)
        return pass_span(instruction)

    def add_weight_gradients(self, micro_batch: int, chunk: int) -> None:
        """The second half of a divided backward pass."""
        instruction = BackwardWeight(micro_batch, chunk)
        self._halves.add_weight_gradients((micro_batch, chunk), self._during_weights(instruction))
        self._after_weights(instruction)

    def differentiable(self, micro_batch: int, boundary: int) -> None:
        """Every state is."""

    def forward(self, micro_batch: int, chunk: int, received: Sequence[torch.Tensor], data: DeviceBatch) -> Any:
        """Run a chunk through Megatron's step function."""
        model = self._models[chunk]
        config = self._config
        is_last = self._is_last and chunk == len(self._models) - 1
        self._told[micro_batch] = data.get("told", NOTHING)
        self._equipped.tell(self._told[micro_batch])
        set_input_tensor = get_attr_wrapped_model(model, "set_input_tensor")
        set_input_tensor(list(received) if received else [None])
        with torch.autocast(self._device.type, config.autocast_dtype, enabled=config.enable_autocast):
            output, loss_function = self._forward_step(iter((data,)), model)
        output, tokens = forward_step_calc_loss(
            model,
            output,
            loss_function,
            config,
            vp_stage=getattr(model, "vp_stage", None),
            collect_non_loss_data=self._collects,
            num_microbatches=self._micro_batches,
            forward_data_store=self._losses,
            cp_group_size=self._groups.cp.size(),
            is_last_stage=is_last,
        )
        set_input_tensor([None])  # the model must not keep what was received, nor the graph behind it
        self._equipped.tell()
        self._tokens = self._tokens + tokens
        return output if is_last or isinstance(output, tuple | list) else (output,)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale by the optimizer's loss scale, if it has one."""
        scale = self._config.grad_scale_func
        scaled: torch.Tensor = loss if scale is None else scale(loss)
        return scaled

    def totals(self) -> torch.Tensor:
        """Sums of the reports, on one of the tensor-parallel ranks that hold the same."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._groups.tp.rank() == 0:
            for report in self._losses:
                total += report[LOSS_NAME]
        return total

    def finalize(self, *, force_all_reduce: bool) -> None:
        """Hand the gradients to Megatron's finalisation, then sum them over the copies of shared weights."""
        self._equipped.tell()
        if self._config.finalize_model_grads_func is not None:
            self.labels = self._tokens.to(torch.int) if self._config.calculate_per_token_loss else None
            self._config.finalize_model_grads_func(
                list(self._models),
                self.labels,  # which it adds up over replicas, in place
                pg_collection=self._groups,
                force_all_reduce=force_all_reduce,
            )
            reduce_shared_gradients(self._models)
            if self._equips:
                finish_iteration(self._models, self._groups)

    def reports(self) -> list[dict[str, torch.Tensor]]:
        """The loss function's report of each micro-batch, on the last stage, in the order of its forward passes.

        Megatron's loop reduces them over the replicas, so one without micro-batches must not be missing, and divides
        their sums: of a batch without labels the loss is 0, by a number that is not.
        """
        if not (self._is_last and self._equips):
            return self._losses
        first, *others = self._losses or [{LOSS_NAME: torch.zeros(2, device=self._device)}]
        if self.labels is not None:
            count = torch.stack([torch.zeros_like(self.labels), self.labels == 0])
            first = first | {LOSS_NAME: first[LOSS_NAME] + count.to(first[LOSS_NAME])}
        return [first, *others]
