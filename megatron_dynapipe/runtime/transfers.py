"""A stage's transfers: the handlers of their four instructions, over a transport and pools of buffers.

    OUTPUT ──SEND: copied──► a buffer of the pool ──transport──► a buffer of the peer's pool ──WAIT_RECV──► INPUT

The pools are those that the plan's memory counts (`core.memory`): as many equal buffers as a list holds at once.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.core.executor import BufferTable, Dtypes, Handlers
from megatron_dynapipe.core.instructions import (
    POOLS,
    RECEIVED_BUFFER,
    SENT_BUFFER,
    BackwardWeight,
    Buffer,
    Free,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    Transfer,
    buffer_of,
    channel_of,
    format_instruction,
)
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.outputs import warn
from megatron_dynapipe.runtime.messages import MessageBuffers, message_bytes, views
from megatron_dynapipe.runtime.transport import JoinedWork, Transport, Work

_TransferKey = tuple[Payload, int, int]


class PooledTransfers:
    """Runs the transfers of one rank's lists.

    Args:
        transport: moves tensors between stages.
        device: that messages lie on.
        stages: ranks of the pipeline.
        dtype: the type of the tensors that cross stage boundaries.
    """

    def __init__(self, transport: Transport, device: torch.device, *, stages: int, dtype: torch.dtype) -> None:
        self._transport = transport
        self._stages = stages
        self._stage = 0
        self._default: Dtypes = lambda transfer: (dtype,) * len(transfer.shapes)
        self._dtypes: Dtypes = self._default
        self._sending: dict[_TransferKey, Work] = {}
        self._receiving: dict[_TransferKey, tuple[Work, list[torch.Tensor]]] = {}
        self._pools = {buffer: MessageBuffers(device) for buffer in set(POOLS.values())}
        self._planned: Counter[Buffer] = Counter()
        self._has_warned = False

    @property
    def handlers(self) -> Handlers:
        """The handlers of every kind of transfer."""
        return {
            SendStart: self._start_send,
            SendWait: self._wait_send,
            RecvStart: self._start_recv,
            RecvWait: self._wait_recv,
        }

    def begin(self, plan: StagePlan, dtypes: Dtypes | None) -> None:
        """A list begins whose tensors have these dtypes; None for the dtypes of all lists."""
        self._stage = plan.stage
        self._dtypes = dtypes or self._default
        largest = _largest_messages(plan, self._dtypes)
        self._planned = _most_at_once(plan)
        for buffer, pool in self._pools.items():
            pool.begin(largest.get(buffer, 0))

    def _start_send(self, instruction: SendStart, buffers: BufferTable) -> None:
        key = SENT_BUFFER[instruction.payload], instruction.micro_batch, instruction.chunk
        tensors = buffers.tensors(*key)
        shapes = tuple([tensor.shape for tensor in tensors])
        if shapes != instruction.shapes:
            sent = tuple(map(tuple, shapes))
            raise ExecutionError(
                f"expected to send tensors of shapes {instruction.shapes}, got {sent}",
                hint="in a loop of your own, wire_rows has to say how many rows your step function makes of samples",
            )
        expected = list(self._dtypes(instruction))
        dtypes = [tensor.dtype for tensor in tensors]
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
        shapes = instruction.shapes
        dtypes = self._dtypes(instruction)
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

    def check_finished(self) -> None:
        """Raise ExecutionError naming the transfers that a list has left under way."""
        if self._sending or self._receiving:
            left = [f"{p.name} of micro-batch {mb}" for p, mb, _ in (*self._sending, *self._receiving)]
            raise ExecutionError(f"expected every transfer to be waited for, got {', '.join(left)} unfinished")

    def end(self, *, failed: bool) -> None:
        """A list has ended, and nothing of its step stays alive; peers that wait for a failed one have deadlines."""
        self._dtypes = self._default
        for buffer, pool in self._pools.items():
            if len(pool) > self._planned[buffer] and not self._has_warned:
                self._has_warned = True
                warn(
                    f"messages took {len(pool)} buffers ({buffer.name}) where the plan counts {self._planned[buffer]}:"
                    " transfers hold their tensors for longer than their waits, in memory that no plan counts"
                )
        if failed:
            self._sending.clear()
            self._receiving.clear()
            for pool in self._pools.values():
                pool.begin(0)


def _largest_messages(plan: StagePlan, dtypes: Dtypes) -> dict[Buffer, int]:
    """Bytes of the largest message of each pool in a list."""
    largest: dict[Buffer, int] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, (RecvStart, SendStart)):
            pool = POOLS[buffer_of(instruction)]
            size = message_bytes(instruction.shapes, dtypes(instruction))
            largest[pool] = max(size, largest.get(pool, 0))
    return largest


def _most_at_once(plan: StagePlan) -> Counter[Buffer]:
    """Buffers of each pool that a list holds at the same time, as plans count them (`core.memory`).

    No bound in lists with divided backward passes: messages are operands of their second halves, too, and count as what
    these store.
    """
    used: Counter[Buffer] = Counter()
    most: Counter[Buffer] = Counter()
    for step in plan.instructions:
        if isinstance(step, (RecvStart, SendStart)):
            pool = POOLS[buffer_of(step)]
            used[pool] += 1
            most[pool] = max(most[pool], used[pool])
        elif isinstance(step, Free) and step.buffer in POOLS:
            used[POOLS[step.buffer]] -= 1
    if any(isinstance(step, BackwardWeight) for step in plan.instructions):
        most.update(dict.fromkeys(POOLS.values(), len(plan.instructions)))
    return most


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(str, dtypes)))


def _transfer_key(instruction: Transfer) -> _TransferKey:
    return instruction.payload, instruction.micro_batch, instruction.chunk
