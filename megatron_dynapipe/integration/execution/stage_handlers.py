"""The stage handlers of Megatron's models: load a micro-batch, run it forward, run it backward.

Megatron's own `forward_step` and `backward_step` assume one tensor per stage boundary; a T5's decoder stages pass two.
These run one backward over all outputs of a stage, so that autograd adds the gradient of an encoder output handed on
to that of the stage's own cross-attention.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.utils import get_attr_wrapped_model

from megatron_dynapipe.plan.instructions import Backward, Buffer, Forward, Load
from megatron_dynapipe.runtime import BufferTable, Entry, Handlers, StageGraph

DeviceBatch = Mapping[str, Any]
"""What a step function takes from its iterator for one micro-batch."""
LoadMicroBatch = Callable[[int], DeviceBatch]
"""Makes the device tensors of the micro-batch of that index."""
PrepareMicroBatch = Callable[[int], None]
"""Called with the index of the micro-batch that runs next."""
ForwardStep = Callable[[Iterator[DeviceBatch], torch.nn.Module], tuple[Any, Callable[..., Any]]]
"""Megatron's step function: takes one batch, returns the model's output and the loss function for it."""


class StageHandlers:
    """Runs one iteration's micro-batches through this rank's model chunks.

    Args:
        models: one (wrapped) model per chunk of this rank.
        config: Megatron's model configuration; its timers must be off (`hooks.timers`).
        forward_step: Megatron's step function.
        load: makes a micro-batch's device tensors.
        stage, stages: this rank's place in the pipeline.
        context_parallel_size: as Megatron's loss calculation wants it.
        forward_only: evaluation; nothing is kept for a backward pass.
        prepare: called with the micro-batch before each of its passes (`MicroBatchContext.begin`).
        before_backward: called with each backward pass before it runs (overlapped gradient reduction).

    Attributes:
        losses: the loss function's report of each micro-batch, on the last stage.
        tokens: the number of target tokens so far, on the last stage.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        config: Any,
        forward_step: ForwardStep,
        load: LoadMicroBatch,
        *,
        stage: int,
        stages: int,
        context_parallel_size: int,
        forward_only: bool,
        prepare: PrepareMicroBatch,
        before_backward: Callable[[Backward], None],
    ) -> None:
        self._models = models
        self._config = config
        self._forward_step = forward_step
        self._load_micro_batch = load
        self._stage = stage
        self._stages = stages
        self._context_parallel_size = context_parallel_size
        self._forward_only = forward_only
        self._prepare = prepare
        self._before_backward = before_backward
        self._graphs: dict[tuple[int, int], StageGraph] = {}
        self.losses: list[dict[str, torch.Tensor]] = []
        # On the device from the start: moving it there later would wait for all passes.
        self.tokens: torch.Tensor = torch.zeros([], dtype=torch.int, device=next(models[0].parameters()).device)

    @property
    def table(self) -> Handlers:
        """The handler of every instruction that computes, for `PipelineExecutor.execute`."""
        return {Load: self.load, Forward: self.forward, Backward: self.backward}

    def load(self, instruction: Load, buffers: BufferTable) -> None:
        """Handler of `Load`."""
        batch = self._load_micro_batch(instruction.micro_batch)
        buffers.put(Buffer.DATA, instruction.micro_batch, 0, batch)

    def forward(self, instruction: Forward, buffers: BufferTable) -> None:
        """Handler of `Forward`."""
        micro_batch, chunk = instruction.micro_batch, instruction.chunk
        self._prepare(micro_batch)
        received = () if self._is_first(chunk) else buffers.tensors(Buffer.INPUT, micro_batch, chunk)
        entry = Entry(received, [not self._forward_only] * len(received))
        output = self._run_forward(chunk, entry.tensors, buffers.get(Buffer.DATA, micro_batch, 0))
        if self._is_last(chunk):
            graph = StageGraph.to_loss(entry, output)
        else:
            outputs: Sequence[torch.Tensor] = output if isinstance(output, tuple | list) else (output,)
            buffers.put(Buffer.OUTPUT, micro_batch, chunk, tuple(t.detach() for t in outputs))
            graph = StageGraph.to_outputs(entry, outputs)
        if not self._forward_only:
            self._graphs[micro_batch, chunk] = graph

    def backward(self, instruction: Backward, buffers: BufferTable) -> None:
        """Handler of `Backward`."""
        micro_batch, chunk = instruction.micro_batch, instruction.chunk
        self._prepare(micro_batch)
        self._before_backward(instruction)
        gradients = () if self._is_last(chunk) else buffers.tensors(Buffer.OUTPUT_GRAD, micro_batch, chunk)
        graph = self._graphs.pop((micro_batch, chunk))
        made = graph.backward(gradients, scale=self._config.grad_scale_func)
        if not self._is_first(chunk):
            buffers.put(Buffer.INPUT_GRAD, micro_batch, chunk, made)

    def _run_forward(self, chunk: int, inputs: Sequence[torch.Tensor], batch: DeviceBatch) -> Any:
        model, config = self._models[chunk], self._config
        set_input_tensor = get_attr_wrapped_model(model, "set_input_tensor")
        set_input_tensor(list(inputs) if inputs else [None])
        with torch.autocast(self._device_type(), config.autocast_dtype, enabled=config.enable_autocast):
            output, loss_function = self._forward_step(iter((batch,)), model)
        output, tokens = forward_step_calc_loss(
            model,
            output,
            loss_function,
            config,
            vp_stage=getattr(model, "vp_stage", None),
            collect_non_loss_data=False,
            num_microbatches=1,  # unused: the loss is a sum over tokens
            forward_data_store=self.losses,
            cp_group_size=self._context_parallel_size,
            is_last_stage=self._is_last(chunk),
        )
        set_input_tensor([None])  # the model must not keep what was received, nor the graph behind it
        self.tokens = self.tokens + tokens
        return output

    def _device_type(self) -> str:
        return next(self._models[0].parameters()).device.type

    def _is_first(self, chunk: int) -> bool:
        return self._stage == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self._stage == self._stages - 1 and chunk == len(self._models) - 1
