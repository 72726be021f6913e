"""What a stage holds at a moment: one value per (buffer, micro-batch, chunk), made and dropped by instructions."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_dynapipe.errors import ExecutionError
from megatron_dynapipe.plan.instructions import Buffer, Free

_Key = tuple[Buffer, int, int]


class BufferTable:
    """The stage's buffers. Dropping an entry drops this table's reference alone: tensors that the autograd graph
    still needs live until their backward pass, all others are freed at once.
    """

    def __init__(self) -> None:
        self._values: dict[_Key, Any] = {}

    def put(self, buffer: Buffer, micro_batch: int, chunk: int, value: Any) -> None:
        """Hold `value`; tensors for every buffer but DATA, which holds what the LOAD handler made.

        Raises:
            ExecutionError: the buffer is held already.
        """
        key = (buffer, micro_batch, chunk)
        if key in self._values:
            raise ExecutionError(f"expected {_name(key)} to be free before it is made again, but it is held")
        self._values[key] = value

    def get(self, buffer: Buffer, micro_batch: int, chunk: int) -> Any:
        """The held value.

        Raises:
            ExecutionError: nothing made it, or it was freed.
        """
        try:
            return self._values[buffer, micro_batch, chunk]
        except KeyError:
            raise ExecutionError(f"expected {_name((buffer, micro_batch, chunk))} to be held, but it is not") from None

    def tensors(self, buffer: Buffer, micro_batch: int, chunk: int) -> Sequence[torch.Tensor]:
        """The held tensors of one boundary."""
        value: Sequence[torch.Tensor] = self.get(buffer, micro_batch, chunk)
        return value

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
            names = ", ".join(_name(key) for key in self._values)
            raise ExecutionError(f"expected no buffer to be held at the end of the instruction list, got {names}")


def _name(key: _Key) -> str:
    buffer, micro_batch, chunk = key
    return f"{buffer.name} of micro-batch {micro_batch}" + (f" on chunk {chunk}" if chunk else "")
