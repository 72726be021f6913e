"""What a run leaves behind for its report: JSON lines, one file per rank, decoded strictly.

rank-0.jsonl   {"type": "iteration", "iteration": 0, "measured_ns": …}
               {"type": "timeline", "iteration": 0, "stage": 0, "planned": […], "measured": […]}
"""

from pathlib import Path

import msgspec

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.plan.iteration import Totals
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.units import Shape


class IterationRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="iteration"
):
    """One iteration as one replica saw it."""

    iteration: int
    measured_ns: int
    """From the moment the plan was there to the end of its last instruction."""
    predicted_ns: int
    """By the plan, for the slowest replica."""
    plan_wait_ns: int
    """Time spent waiting for the plan, before `measured_ns` begins."""
    totals: Totals
    """Of the whole iteration, over all replicas."""
    shapes: tuple[Shape, ...]
    """Of this replica's micro-batches."""
    packed: int = 0
    """How many of them are packed rows."""
    cost_model_version: int = 0
    """Of the cost model that the iteration was planned with; 0 is the one that the run began with."""
    allocated_bytes: int = 0
    """Of tensors on this rank's GPU, at their peak; 0 on a CPU, which does not count."""
    reserved_bytes: int = 0
    """Of that GPU held by the allocator, at its peak: above `allocated_bytes` lie fragments and free memory."""
    allocator_retries: int = 0
    """Times that the allocator has had to give its cache back to find room, since the run began."""


class TimelineRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="timeline"
):
    """When one rank was to run its passes, and when it ran its instructions."""

    iteration: int
    replica: int
    stage: int
    planned: tuple[Event, ...]
    measured: tuple[Event, ...]


Record = IterationRecord | TimelineRecord

MOST_BYTES = 16_000_000
"""Of a rank's iterations: some ten thousand in full."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class RecordFile:
    """One rank's file of records, of a bounded size: when it is full, every second iteration is dropped from it.

    From then on every second iteration is added, then every fourth, …, so that those kept are spread over the run.

    Args:
        path: of the file; one of an earlier run is replaced by the first record.
        most_bytes: of iterations; what the run ends with comes on top.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._bytes = 0
        self._seen = 0
        self._stride = 1
        self._is_begun = False

    def add_iteration(self, record: IterationRecord) -> None:
        """Add an iteration, or leave it out so that the file stays within its bound; raises OSError."""
        number, data = self._seen, _encoder.encode_lines([record])
        self._seen += 1
        if number % self._stride == 0 and self._bytes + len(data) > self._most_bytes:
            self._drop_every_second()
        if number % self._stride == 0 and self._bytes + len(data) <= self._most_bytes:
            self._write(data)
            self._bytes += len(data)

    def _drop_every_second(self) -> None:
        self._stride *= 2
        if not self._is_begun:
            return
        kept = b"".join(read_bounded(self.path).splitlines(keepends=True)[::2])
        fresh = self.path.with_name(f".{self.path.name}.unfinished")
        fresh.write_bytes(kept)
        fresh.replace(self.path)
        self._bytes = len(kept)

    def add_timeline(self, record: TimelineRecord) -> None:
        """Add the timeline that a run ends with; raises OSError."""
        self._write(_encoder.encode_lines([record]))

    def read(self) -> bytes:
        """Everything added, for the store; raises OSError."""
        return read_bounded(self.path) if self._is_begun else b""

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab" if self._is_begun else "wb") as file:
            self._is_begun = True
            file.write(data)


def decode_records(data: bytes, *, origin: str) -> list[Record]:
    """The records in a file's bytes; raises DataError naming `origin` and the line that is none."""
    records: list[Record] = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            records.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{origin}, line {number}: {error}") from error
    return records


def read_records(path: Path) -> list[Record]:
    """All records of a rank's file.

    Raises:
        DataError: the file is missing, or a line is not a record (its number is named).
    """
    try:
        data = read_bounded(path)
    except FileNotFoundError:
        raise DataError(f"expected a file of records, found nothing at {path}") from None
    except OSError as error:
        raise DataError(f"cannot read the records {path}: {error.strerror}") from error
    return decode_records(data, origin=str(path))
