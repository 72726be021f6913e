"""The executor: walks one stage's instruction list, giving each instruction to its handler (paper section 3).

The executor itself drops buffers. The object that it is given runs the transfers (`runtime.transfers`). The caller says
what it means to load, run forward and run backward: by a handler for `Load` and each kind of pass, registered once or
given with each list (`core.passes`).

    transfers = PooledTransfers(transport, platform.device, stages=4, dtype=torch.bfloat16)
    executor = PipelineExecutor(transfers, platform)
    executor.execute(stage_plan, {Load: load, Forward: forward, Backward: backward})
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch._C._autograd import _profiler_enabled

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.core.instructions import (
    EFFECTS,
    Buffer,
    Free,
    Instruction,
    RecvStart,
    SendStart,
    format_instruction,
    point_at,
)
from megatron_dynapipe.core.plan import Event, StagePlan

Mark = Callable[[], int]
"""A moment on the device: call it, once the device has passed it, for its time in nanoseconds."""


class DevicePlatform(Protocol):
    """The facts of a device that the executor needs (`runtime.platform` implements it for a CPU and for CUDA)."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...

    def align(self) -> None:
        """Begin an iteration's marks: their times stay exact to a microsecond for some seconds after this call."""
        ...

    def mark(self) -> Mark:
        """Mark the present moment of the device's work, without waiting for it."""
        ...

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has passed one of its marks, without waiting for it."""
        ...

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        ...

    def peak_bytes(self) -> int | None:
        """High-water mark of device memory since the last call, or None where the device does not count."""
        ...


class Trace:
    """A mark after every instruction, at which the next one starts; read once the device has passed them."""

    def __init__(self, platform: DevicePlatform) -> None:
        self._mark = platform.mark
        self._has_passed = platform.has_passed
        self._instructions: list[Instruction] = []
        platform.align()
        self._marks: list[Mark] = [platform.mark()]

    def __len__(self) -> int:
        """Instructions that have been issued."""
        return len(self._instructions)

    def add(self, instruction: Instruction) -> None:
        """An instruction has been issued."""
        self._marks.append(self._mark())
        self._instructions.append(instruction)

    def moment(self) -> Mark:
        """Mark the present moment of the device's work on the clock of the instructions, after or between them."""
        return self._mark()

    def reached(self) -> int:
        """Instructions that the device has passed, without waiting for it; the next is where it stands."""
        ends = self._marks[1 : len(self) + 1]
        return next((step for step, end in enumerate(ends) if not self._has_passed(end)), len(ends))

    def events(self) -> tuple[Event, ...]:
        """The instructions with their start and end on the host's monotonic clock, in nanoseconds.

        Waits until the device has passed the last of them.
        """
        times = [mark() for mark in self._marks]
        return tuple(map(Event, self._instructions, times, times[1:]))

    def span_ns(self) -> int:
        """The time from the first instruction's start to the last one's end; waits until the device has passed it."""
        return self._marks[-1]() - self._marks[0]()


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


Handler = Callable[[Any, BufferTable], None]
"""Runs one instruction: takes what it needs from the buffers, puts what it makes into them."""

Handlers = Mapping[type[Instruction], Handler]
"""Handlers by the type of instruction that they run."""

Dtypes = Callable[[SendStart | RecvStart], Sequence[torch.dtype]]
"""Dtypes of a transfer's tensors."""


class Transfers(Protocol):
    """Runs the transfers of lists (`runtime.transfers.PooledTransfers`)."""

    @property
    def handlers(self) -> Handlers:
        """The handlers of every kind of transfer."""
        ...

    def begin(self, plan: StagePlan, dtypes: Dtypes | None) -> None:
        """A list begins whose tensors have these dtypes; None for the dtypes of all lists."""
        ...

    def check_finished(self) -> None:
        """Raise ExecutionError naming the transfers that a list has left under way."""
        ...

    def end(self, *, failed: bool) -> None:
        """A list has ended; what a failed one holds is dropped."""
        ...


class PipelineExecutor:
    """Runs instruction lists on one rank of a pipeline.

    Args:
        transfers: runs the lists' transfers.
        platform: the device that instructions run on.
        watch: told of every list and its trace when it begins; see `Watchdog`.
    """

    def __init__(
        self,
        transfers: Transfers,
        platform: DevicePlatform,
        *,
        watch: Callable[[StagePlan, Trace], None] | None = None,
    ) -> None:
        self._transfers = transfers
        self._platform = platform
        self._watch = watch
        self._handlers: dict[type[Instruction], Handler] = {
            **transfers.handlers,
            Free: lambda instruction, buffers: buffers.free(instruction),
        }

    def register_handler(self, kind: type[Instruction], handler: Handler) -> None:
        """Give instructions of one type to `handler`, in place of the one registered before."""
        if kind not in EFFECTS:
            known = ", ".join(t.__name__ for t in EFFECTS)
            raise ExecutionError(f"expected one of the instruction types {known}, got {kind!r}")
        self._handlers[kind] = handler

    def execute(
        self, plan: StagePlan, handlers: Handlers = MappingProxyType({}), *, dtypes: Dtypes | None = None
    ) -> Trace:
        """Run a stage's list to its end.

        Args:
            plan: the stage's instructions.
            handlers: for this list alone; they win over registered ones.
            dtypes: the types of this list's transfers, if they are not all the executor's.

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
        self._transfers.begin(plan, dtypes)
        buffers = BufferTable()
        trace = Trace(self._platform)
        if self._watch is not None:
            self._watch(plan, trace)
        failed = True
        try:
            for instruction in plan.instructions:
                table[type(instruction)](instruction, buffers)
                trace.add(instruction)
            self._transfers.check_finished()
            buffers.check_empty()
            failed = False
        except BaseException as error:
            if (step := len(trace)) < len(plan.instructions):
                error.add_note(f"at stage {plan.stage}, step {step}: {point_at(plan.instructions, step)}")
            buffers.clear()  # a failed iteration's tensors must not outlive it
            raise
        finally:
            self._transfers.end(failed=failed)
        return trace


def _in_range(handler: Handler) -> Handler:
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


def _buffer_name(key: _BufferKey) -> str:
    buffer, micro_batch, chunk = key
    return f"{buffer.name} of micro-batch {micro_batch}" + (f" on chunk {chunk}" if chunk else "")
