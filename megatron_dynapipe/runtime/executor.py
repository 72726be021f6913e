"""The executor: walks one stage's instruction list, giving each instruction to its handler (paper section 3).

The executor itself moves tensors and drops buffers. What it means to load, run forward and run backward is the
caller's: a handler for `Load` and each kind of pass, registered once or given with each list.

    executor = PipelineExecutor(transport, platform, stages=4, dtype=torch.bfloat16)
    executor.execute(stage_plan, {Load: load, Forward: forward, Backward: backward})
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

from megatron_dynapipe.errors import ExecutionError
from megatron_dynapipe.plan.instructions import (
    INSTRUCTION_TYPES,
    RECEIVED_BUFFER,
    SENT_BUFFER,
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    channel_of,
)
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.plan.memory import POOLS
from megatron_dynapipe.plan.text import format_instruction, point_at
from megatron_dynapipe.runtime.messages import MessageBuffers, message_bytes, views
from megatron_dynapipe.runtime.platform import DevicePlatform
from megatron_dynapipe.runtime.trace import Trace
from megatron_dynapipe.runtime.transfer import JoinedWork, Transport, Work

_BufferKey = tuple[Buffer, int, int]


class BufferTable:
    """The stage's buffers. Dropping an entry drops this table's reference alone: tensors that the autograd graph
    still needs live until their backward pass, all others are freed at once.
    """

    def __init__(self) -> None:
        self._values: dict[_BufferKey, Any] = {}

    def put(self, buffer: Buffer, micro_batch: int, chunk: int, value: Any) -> None:
        """Hold `value`; tensors for every buffer but DATA, which holds what the LOAD handler made.

        Raises:
            ExecutionError: the buffer is held already.
        """
        key = (buffer, micro_batch, chunk)
        if key in self._values:
            raise ExecutionError(f"expected {_buffer_name(key)} to be free before it is made again, but it is held")
        self._values[key] = value

    def get(self, buffer: Buffer, micro_batch: int, chunk: int) -> Any:
        """The held value.

        Raises:
            ExecutionError: nothing made it, or it was freed.
        """
        try:
            return self._values[buffer, micro_batch, chunk]
        except KeyError:
            raise ExecutionError(
                f"expected {_buffer_name((buffer, micro_batch, chunk))} to be held, but it is not"
            ) from None

    def tensors(self, buffer: Buffer, micro_batch: int, chunk: int) -> Sequence[torch.Tensor]:
        """The held tensors of one boundary."""
        value: Sequence[torch.Tensor] = self.get(buffer, micro_batch, chunk)
        return value

    def replace(self, buffer: Buffer, micro_batch: int, chunk: int, value: Sequence[torch.Tensor]) -> None:
        """Hold other tensors in place of those that are held."""
        self._values[buffer, micro_batch, chunk] = value

    def free(self, instruction: Free) -> None:
        """Drop a buffer; raises ExecutionError if it is not held."""
        self.get(instruction.buffer, instruction.micro_batch, instruction.chunk)
        del self._values[instruction.buffer, instruction.micro_batch, instruction.chunk]

    def clear(self) -> None:
        """Drop everything, after a failure."""
        self._values.clear()

    def check_empty(self) -> None:
        """Raises ExecutionError naming what an instruction list left behind."""
        if self._values:
            names = ", ".join(_buffer_name(key) for key in self._values)
            raise ExecutionError(f"expected no buffer to be held at the end of the instruction list, got {names}")


_I = TypeVar(
    "_I", Load, Forward, Backward, BackwardInput, BackwardWeight, SendStart, SendWait, RecvStart, RecvWait, Free
)
Handler = Callable[[_I, BufferTable], None]
"""Runs one instruction: takes what it needs from the buffers, puts what it makes into them."""

Handlers = Mapping[type[Instruction], Handler[Any]]
"""Handlers by the type of instruction that they run."""

Dtypes = Callable[[SendStart | RecvStart], Sequence[torch.dtype]]
"""Dtypes of a transfer's tensors."""

_TransferKey = tuple[Payload, int, int]


class PipelineExecutor:
    """Runs instruction lists on one rank of a pipeline.

    Args:
        transport: moves tensors between stages.
        platform: the device that received tensors are allocated on.
        stages: ranks of the pipeline.
        dtype: of the tensors that cross stage boundaries.
        watch: told of every list and its trace when it begins; see `Watchdog`.
    """

    def __init__(
        self,
        transport: Transport,
        platform: DevicePlatform,
        *,
        stages: int,
        dtype: torch.dtype,
        watch: Callable[[StagePlan, Trace], None] | None = None,
    ) -> None:
        self._transport = transport
        self._platform = platform
        self._stages = stages
        self._watch = watch
        self._default: Dtypes = lambda transfer: (dtype,) * len(transfer.shapes)
        self._dtypes: Dtypes = self._default
        self._handlers: dict[type[Instruction], Handler[Any]] = {}
        self._sending: dict[_TransferKey, Work] = {}
        self._receiving: dict[_TransferKey, tuple[Work, list[torch.Tensor]]] = {}
        self._pools = {buffer: MessageBuffers(platform.device) for buffer in set(POOLS.values())}
        self._stage = 0
        self.register_handler(SendStart, self._start_send)
        self.register_handler(SendWait, self._wait_send)
        self.register_handler(RecvStart, self._start_recv)
        self.register_handler(RecvWait, self._wait_recv)
        self.register_handler(Free, lambda instruction, buffers: buffers.free(instruction))

    def register_handler(self, kind: type[_I], handler: Handler[_I]) -> None:
        """Give instructions of one type to `handler`, in place of the one registered before."""
        if kind not in INSTRUCTION_TYPES:
            known = ", ".join(t.__name__ for t in INSTRUCTION_TYPES)
            raise ExecutionError(f"expected one of the instruction types {known}, got {kind!r}")
        self._handlers[kind] = handler

    def execute(
        self, plan: StagePlan, handlers: Handlers = MappingProxyType({}), *, dtypes: Dtypes | None = None
    ) -> Trace:
        """Run a stage's list to its end.

        Args:
            plan: the stage's instructions.
            handlers: for this list alone; they win over registered ones.
            dtypes: of this list's transfers, where they are not all the executor's.

        Returns:
            When each instruction ran. Under a profiler of PyTorch, `emit_nvtx` among them, each is a range of its own.

        Raises:
            ExecutionError: an instruction without a handler, or buffers or transfers left over at the end.
            Exception: whatever a handler raised, with a note naming the stage, the step and the instruction.
        """
        table = {**self._handlers, **handlers}
        _check_handlers(plan, table)
        if _profiler_enabled():
            table = {kind: _in_range(handler) for kind, handler in table.items()}
        self._stage, self._dtypes = plan.stage, dtypes or self._default
        largest = _largest_messages(plan, self._dtypes)
        for buffer, pool in self._pools.items():
            pool.begin(largest.get(buffer, 0))
        buffers, trace = BufferTable(), Trace(self._platform)
        if self._watch is not None:
            self._watch(plan, trace)
        try:
            for instruction in plan.instructions:
                table[type(instruction)](instruction, buffers)
                trace.add(instruction)
            self._check_finished(buffers)
        except BaseException as error:
            if (step := len(trace)) < len(plan.instructions):
                error.add_note(f"at stage {plan.stage}, step {step}: {point_at(plan.instructions, step)}")
            self._abandon(buffers)
            raise
        finally:
            self._dtypes = self._default  # keeps nothing of the step alive
        return trace

    def _start_send(self, instruction: SendStart, buffers: BufferTable) -> None:
        key = SENT_BUFFER[instruction.payload], instruction.micro_batch, instruction.chunk
        tensors = buffers.tensors(*key)
        shapes = tuple([tensor.shape for tensor in tensors])
        if shapes != instruction.shapes:
            sent = tuple(map(tuple, shapes))
            raise ExecutionError(f"expected to send tensors of shapes {instruction.shapes}, got {sent}")
        expected, dtypes = list(self._dtypes(instruction)), [tensor.dtype for tensor in tensors]
        if dtypes != expected:
            raise ExecutionError(
                f"expected to send tensors of {_names(expected)}, as which they are received, got {_names(dtypes)}",
                hint="give the executor the type of the states between stages (Megatron's `pipeline_dtype`)",
            )
        if not tensors:
            self._sending[_transfer_key(instruction)] = JoinedWork([])
            return
        message = views(self._pools[POOLS[key[0]]].take(), shapes, dtypes)
        for part, tensor in zip(message, tensors, strict=True):
            part.copy_(tensor)
        buffers.replace(*key, message)
        channel = channel_of(instruction.payload, self._stage, instruction.peer, self._stages)
        self._sending[_transfer_key(instruction)] = self._transport.start_send(channel, instruction.peer, message)

    def _wait_send(self, instruction: SendWait, buffers: BufferTable) -> None:
        work = self._sending.pop(_transfer_key(instruction), None)
        if work is None:
            raise ExecutionError(f"{format_instruction(instruction)} waits for a send that was not started")
        work.wait()

    def _start_recv(self, instruction: RecvStart, buffers: BufferTable) -> None:
        shapes, dtypes = instruction.shapes, self._dtypes(instruction)
        tensors = views(self._pools[POOLS[RECEIVED_BUFFER[instruction.payload]]].take(), shapes, dtypes)
        channel = channel_of(instruction.payload, instruction.peer, self._stage, self._stages)
        work = self._transport.start_recv(channel, instruction.peer, tensors) if tensors else JoinedWork([])
        self._receiving[_transfer_key(instruction)] = work, tensors

    def _wait_recv(self, instruction: RecvWait, buffers: BufferTable) -> None:
        started = self._receiving.pop(_transfer_key(instruction), None)
        if started is None:
            raise ExecutionError(f"{format_instruction(instruction)} waits for a receive that was not started")
        work, tensors = started
        work.wait()
        buffers.put(RECEIVED_BUFFER[instruction.payload], instruction.micro_batch, instruction.chunk, tensors)

    def _check_finished(self, buffers: BufferTable) -> None:
        if self._sending or self._receiving:
            left = [f"{p.name} of micro-batch {mb}" for p, mb, _ in (*self._sending, *self._receiving)]
            raise ExecutionError(f"expected every transfer to be waited for, got {', '.join(left)} unfinished")
        buffers.check_empty()

    def _abandon(self, buffers: BufferTable) -> None:
        """Forget a failed iteration: its tensors must not outlive it. The peers' waits end by their deadlines."""
        self._sending.clear()
        self._receiving.clear()
        for pool in self._pools.values():
            pool.begin(0)
        buffers.clear()


def _in_range(handler: Handler[Any]) -> Handler[Any]:
    """A handler whose instructions are ranges, by their text, to PyTorch's profiler and to Nsight Systems."""

    def run(instruction: Instruction, buffers: BufferTable) -> None:
        with torch.profiler.record_function(format_instruction(instruction)):
            handler(instruction, buffers)

    return run


def _check_handlers(plan: StagePlan, handlers: Handlers) -> None:
    missing = {type(i).__name__ for i in plan.instructions} - {t.__name__ for t in handlers}
    if missing:
        raise ExecutionError(
            f"no handler is registered for {', '.join(sorted(missing))}",
            hint="give execute a handler for Load, Forward and Backward, or register them before",
        )


def _largest_messages(plan: StagePlan, dtypes: Dtypes) -> dict[Buffer, int]:
    """Bytes of the largest message of each pool in a list."""
    largest: dict[Buffer, int] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, (RecvStart, SendStart)):
            pool = POOLS[(RECEIVED_BUFFER if isinstance(instruction, RecvStart) else SENT_BUFFER)[instruction.payload]]
            size = message_bytes(instruction.shapes, dtypes(instruction))
            largest[pool] = max(size, largest.get(pool, 0))
    return largest


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(str, dtypes)))


def _transfer_key(instruction: SendStart | SendWait | RecvStart | RecvWait) -> _TransferKey:
    return instruction.payload, instruction.micro_batch, instruction.chunk


def _buffer_name(key: _BufferKey) -> str:
    buffer, micro_batch, chunk = key
    return f"{buffer.name} of micro-batch {micro_batch}" + (f" on chunk {chunk}" if chunk else "")
