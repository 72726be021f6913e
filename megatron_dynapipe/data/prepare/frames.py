"""What goes through the pipes between `pool` and `worker`: frames, each its length in bytes, then the bytes."""

import struct
from typing import IO

import msgspec

from megatron_dynapipe.data.mixture.rows import Block
from megatron_dynapipe.data.prepare.encode import EncodedBlock

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
