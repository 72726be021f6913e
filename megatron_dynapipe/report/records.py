"""What a run leaves behind for its report: JSON lines, one file per rank, decoded strictly.

rank-0.jsonl   {"type": "iteration", "iteration": 0, "measured_ns": …}
               {"type": "timeline", "iteration": 0, "stage": 0, "planned": […], "measured": […]}
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_dynapipe.errors import DataError
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
    loss: float | None = None
    cost_model_version: int = 0
    """Of the cost model that the iteration was planned with; 0 is the one that the run began with."""


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

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add records to a rank's file, which is made with its folder if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_encoder.encode_lines(records))


def read_records(path: Path) -> list[Record]:
    """All records of a rank's file.

    Raises:
        DataError: the file is missing, or a line is not a record (its number is named).
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(f"expected a file of records, found nothing at {path}") from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_decoder.decode(line))
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    return records
