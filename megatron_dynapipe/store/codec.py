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

from megatron_dynapipe.core.errors import PlanDecodeError, PlanError
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.store.entry import StageEntry

MAGIC = b"DYNAPL"
VERSION = 7
DIGEST_BYTES = 16
_HEADER = struct.Struct(f">{len(MAGIC)}sH{DIGEST_BYTES}s")

_encoder = msgspec.msgpack.Encoder()


def is_plan(head: bytes) -> bool:
    """Whether bytes begin as a plan's do, of whatever version."""
    return head.startswith(MAGIC)


def digest(plan: IterationPlan) -> str:
    """The plan's identity: 32 hexadecimal digits, equal exactly when the plans are equal."""
    return _checksum(_with_fields(plan)).hex()


def encode(value: IterationPlan | StageEntry) -> bytes:
    """Bytes of a plan or of one rank's share, for the store or a file."""
    return _seal(_with_fields(value))


def encode_entries(plan: IterationPlan) -> Sequence[tuple[int, int, bytes]]:
    """(replica, stage, bytes) for every rank that runs a share of the plan.

    What several of them hold is encoded once; the bytes are what `encode(StageEntry.of(…))` gives.
    """
    if not plan.replicas:
        return []
    shares = [
        (_raw(share.micro_batches), [_raw(stage) for stage in share.stages], share.predicted_ns)
        for share in plan.replicas
    ]
    plan_digest = _checksum(_with_fields(plan, replicas=shares)).hex()
    common = StageEntry.of(plan, 0, 0, plan_digest=plan_digest)
    return [
        (replica, stage, _seal(_with_fields(common, replica=replica, micro_batches=batches, stage_plan=stage_plan)))
        for replica, (batches, stages, _) in enumerate(shares)
        for stage, stage_plan in enumerate(stages)
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


def _with_fields(record: IterationPlan | StageEntry, **fields: object) -> bytes:
    """The payload of a record with other values, encoded ones too, in some of its fields: an array of all fields.

    A plan says how many replicas run in step where they do.
    """
    names = [name for name in record.__struct_fields__ if name != "in_step" or getattr(record, name) > 1]
    return _encoder.encode([fields.get(name, getattr(record, name)) for name in names])


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def _seal(payload: bytes) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, _checksum(payload)) + payload


def _checksum(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
