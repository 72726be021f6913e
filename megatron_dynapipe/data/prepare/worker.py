"""A process that encodes blocks: `python -m megatron_dynapipe.data.prepare.worker`.

On its stdin come frames (length, then bytes): a work order, then blocks; for each of these a frame goes to stdout. It
ends with its stdin.
"""

import struct
import sys
from typing import IO

import msgspec

from megatron_dynapipe.data.mixture.rows import Block
from megatron_dynapipe.data.prepare.encode import EncodedBlock, Encoder, WorkOrder
from megatron_dynapipe.errors import DynaPipeError

_LENGTH = struct.Struct("<Q")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A block to encode, of the entry of this number."""

    task: int
    block: Block


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it: samples, or an error with its hint."""

    encoded: EncodedBlock | None = None
    error: str | None = None
    hint: str | None = None


def send(file: IO[bytes], data: bytes) -> None:
    """Write a frame."""
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end, or where the other side has ended within one."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return data if len(data) == length else None


def main() -> None:
    """Encode until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is not a frame
    order = receive(source)
    if order is None:
        return
    encoder: Encoder | None = None
    while (job_bytes := receive(source)) is not None:
        job = msgspec.msgpack.decode(job_bytes, type=Job)
        try:
            encoder = encoder or Encoder(msgspec.msgpack.decode(order, type=WorkOrder))
            done = Done(encoded=encoder(job.block, job.task))
        except DynaPipeError as error:
            done = Done(error=error.message, hint=error.hint)
        send(sink, msgspec.msgpack.encode(done))


if __name__ == "__main__":
    main()
