"""Plans as bytes: versioned, checked, decoded strictly.

    ┌──────────┬─────────┬──────────────────┬─────────────┐
    │ "DYNAPL" │ u16     │ BLAKE2b-128 of   │ MessagePack │
    │ 6 bytes  │ version │ payload, 16 bytes│ payload     │
    └──────────┴─────────┴──────────────────┴─────────────┘

Changing the wire format: add an instruction with a number never used before, or raise `VERSION` when a record's
fields change; a reader refuses any other version, since a plan is cheap to make again and costly to misread.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from megatron_dynapipe.errors import PlanDecodeError, PlanError
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry

MAGIC = b"DYNAPL"
VERSION = 3
DIGEST_BYTES = 16
_HEADER = struct.Struct(f">{len(MAGIC)}sH{DIGEST_BYTES}s")

_encoder = msgspec.msgpack.Encoder()


def digest(plan: IterationPlan) -> str:
    """The plan's identity: 32 hexadecimal digits, equal exactly when the plans are equal."""
    return _checksum(_encoder.encode(plan)).hex()


def encode(value: IterationPlan | StageEntry) -> bytes:
    """Bytes of a plan or of one rank's share, for the store or a file."""
    payload = _encoder.encode(value)
    return _HEADER.pack(MAGIC, VERSION, _checksum(payload)) + payload


def encode_entries(plan: IterationPlan) -> Sequence[tuple[int, int, bytes]]:
    """(replica, stage, bytes) for every rank that runs a share of the plan."""
    plan_digest = digest(plan)
    return [
        (replica, stage, encode(StageEntry.of(plan, replica, stage, plan_digest=plan_digest)))
        for replica, share in enumerate(plan.replicas)
        for stage in range(len(share.stages))
    ]


def decode_plan(data: bytes) -> IterationPlan:
    """The whole plan that `encode` wrote.

    Raises:
        PlanDecodeError: not a plan, another version, damaged, or a field of the wrong form (named).
    """
    return _decode(data, IterationPlan)


def decode_entry(data: bytes) -> StageEntry:
    """One rank's share of a plan that `encode` wrote; raises as `decode_plan`."""
    return _decode(data, StageEntry)


def _decode[T: (IterationPlan, StageEntry)](data: bytes, kind: type[T]) -> T:
    if len(data) < _HEADER.size:
        raise PlanDecodeError(f"expected at least {_HEADER.size} bytes of a plan, got {len(data)}")
    magic, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PlanDecodeError(f"expected a plan starting with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise PlanDecodeError(
            f"expected plan format version {VERSION}, got {version}",
            hint="plan again with the installed version of megatron_dynapipe",
        )
    payload = memoryview(data)[_HEADER.size :]
    if (actual := _checksum(payload)) != checksum:
        raise PlanDecodeError(
            f"the plan is damaged: expected digest {checksum.hex()}, got {actual.hex()} of {len(payload)} bytes"
        )
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PlanError) as error:
        raise PlanDecodeError(f"not a valid {kind.__name__}: {error}") from error


def _checksum(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
