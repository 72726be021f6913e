"""The records that a run leaves behind for its report: JSON lines, one file per rank, decoded strictly.

rank-0.jsonl   {"type": "run", "stages": 2, …}
               {"type": "iteration", "iteration": 0, "measured_ns": …}
               {"type": "stage", "iteration": 0, "stage": 0, "forward_ns": …}
               {"type": "timeline", "iteration": 0, "stage": 0, "planned": […], "measured": […]}
               {"type": "evaluation", "iteration": 10, "split": "valid", "losses": {…}}
"""

from pathlib import Path
from typing import get_args

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.plan import Event, Totals
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.outputs import replace_bytes


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class IterationRecord(_Record, frozen=True, tag="iteration"):
    """One iteration as one replica saw it."""

    iteration: int
    measured_ns: int
    """Time from the moment the plan was there to the end of its last instruction."""
    predicted_ns: int
    """The plan's prediction for the slowest replica."""
    plan_wait_ns: int
    """Time spent waiting for the plan, before `measured_ns` begins."""
    totals: Totals
    """Totals of the whole iteration, over all replicas."""
    shapes: tuple[Shape, ...]
    """Shapes of this replica's micro-batches."""
    packed: int = 0
    """How many of them are packed rows."""
    allocated_bytes: int = 0
    """Memory of tensors on this rank's GPU, at their peak; 0 on a CPU, which does not count."""
    reserved_bytes: int = 0
    """Memory of that GPU held by the allocator, at its peak: above `allocated_bytes` lie fragments and free memory."""
    allocator_retries: int = 0
    """Times that the allocator has had to give its cache back to find room, since the run began."""
    at_peak_ns: int = 0
    """Time that all devices would take for the iteration's operations at the peak of their data sheets; 0 where that is
    not known."""
    corrections: tuple[tuple[int, int, int], ...] = ()
    """Percent of what costs say that the plan counted on, by virtual stage (`PlannerSettings.corrections`)."""


class RunRecord(_Record, frozen=True, tag="run"):
    """The facts that all iterations of a run, or of one of its starts, have in common."""

    world_size: int
    stages: int
    memory_limit_bytes: int
    """Memory of a device that plans may use."""
    model_state_bytes: tuple[int, ...]
    """Parameters, gradients and optimizer states of each stage; empty where they were not counted."""
    maximum: Shape
    """Lengths that a run without planning would pad every sample to."""
    first_iteration: int = 0
    """At which this start began: 0, or where the checkpoint was that it resumed."""
    computed_costs: bool = False
    """Whether plans were made of costs that were computed, not measured."""
    samples: dict[str, dict[str, int]] = {}
    """Numbers of the dataset's samples, by split and task."""
    evaluated: dict[str, int] = {}
    """How many of a split's samples an evaluation runs, by split."""
    about: dict[str, str] = {}
    """The run in words: command, model, data, layout, machine, optimizer, versions, the time at which it began."""


class StageRecord(_Record, frozen=True, tag="stage"):
    """Where one stage's time and memory went in one iteration."""

    iteration: int
    replica: int
    stage: int
    forward_ns: int
    backward_ns: int
    transfer_ns: int
    """Inside transfers' instructions: mostly waits, for the other side (the bubble) or for the data."""
    other_ns: int
    """Loads and frees."""
    plan_wait_ns: int
    between_ns: int
    """Time from the end of the previous iteration's list to this one's, without `plan_wait_ns`: gradient reduction,
    optimizer, log, evaluations and checkpoints. 0 in the first."""
    planned_activation_bytes: int
    """The most that passes hold at a time, by the plan, without model state."""
    reduction_ns: int = 0
    """The part of `between_ns` until gradients were final: reductions that passes had not hidden."""
    optimizer_ns: int = 0
    """The part of `between_ns` from then until Megatron's step was done: clipping, the optimizer, the schedule."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    losses: dict[str, tuple[float, float]] = {}
    """On the last stage: (sum over tokens, tokens) of this replica, by the loss's name."""


class TimelineRecord(_Record, frozen=True, tag="timeline"):
    """When one rank was to run its passes, and when it ran its instructions."""

    iteration: int
    replica: int
    stage: int
    planned: tuple[Event, ...]
    measured: tuple[Event, ...]


class MemoryRecord(_Record, frozen=True, tag="memory"):
    """The most that one rank's allocator held of its GPU, over a whole run that reserved nothing ahead."""

    rank: int
    allocated_bytes: int
    """Memory of tensors, at their peak."""
    reserved_bytes: int
    """Held of the device, at its peak: the allocator keeps what it once took."""
    retries: int
    """Times that it had to give its cache back to find room."""

    @property
    def fragment_bytes(self) -> int:
        """Memory that it took beyond its tensors' peak, since free pieces did not fit new tensors."""
        return max(self.reserved_bytes - self.allocated_bytes, 0)


class EvaluationRecord(_Record, frozen=True, tag="evaluation"):
    """Losses by task as one replica's last stage saw them: of an evaluation, or of training since the log's last line.

    Two evaluations of one state, as Megatron does at a run's end, are one.
    """

    iteration: int
    """Training iterations done before it."""
    split: str
    """"valid" or "test"; "train" of training."""
    losses: dict[str, tuple[float, float]]
    """(sum over tokens, tokens) of this replica, by the loss's name: the whole, and every task."""


Record = RunRecord | IterationRecord | StageRecord | TimelineRecord | MemoryRecord | EvaluationRecord
RECORD_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Record))
"""The values of "type" by which lines say what they are."""

MOST_BYTES = 16_000_000
"""Size of a rank's iterations: some ten thousand in full."""
MOST_TIMELINES = 32
"""The most timelines of a rank, in addition to the last iteration's."""
MOST_EVALUATIONS = 256
"""Evaluations of a rank and split: a task's losses take some 50 bytes in each."""

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class RecordFile:
    """One rank's file of records, of a bounded size: when it is full, every second iteration is dropped from it.

    From then on every second iteration is added, then every fourth, …, so that those kept are spread over the run.
    Timelines are thinned out in the same way, by their number, so that all ranks keep the same iterations';
    of evaluations, which come at any distance, every second one goes when there are too many.

    Args:
        path: the file's; one of an earlier run is replaced by the first record.
        most_bytes: the most bytes of iterations; timelines and evaluations come on top.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._bytes = 0
        self._first: int | None = None
        self._stride = 1
        self._timeline_stride = 1
        self._timelines: list[int] = []
        self._evaluations: dict[str, list[int]] = {}
        self._is_begun = False

    def add(self, record: RunRecord | MemoryRecord) -> None:
        """Add what the run begins or ends with; raises OSError."""
        self._write(_encoder.encode_lines([record]))

    def add_iteration(self, *records: IterationRecord | StageRecord) -> None:
        """Add one iteration's records, or leave them out so that the file stays within its bound; raises OSError."""
        if not records:
            return
        iteration = records[0].iteration
        data = _encoder.encode_lines(records)
        if self._is_kept(iteration, self._stride) and self._bytes + len(data) > self._most_bytes:
            self._stride *= 2
            self._thin_out()
        if self._is_kept(iteration, self._stride) and self._bytes + len(data) <= self._most_bytes:
            self._write(data)
            self._bytes += len(data)

    def wants_timeline(self, iteration: int) -> bool:
        """Whether this iteration is one of those whose timelines are kept."""
        return self._is_kept(iteration, self._timeline_stride)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Add an evaluation; where there are too many, every second one goes. Raises OSError."""
        kept = self._evaluations.setdefault(record.split, [])
        if record.iteration not in kept:
            if len(kept) >= MOST_EVALUATIONS:
                del kept[1::2]
                self._thin_out()
            kept.append(record.iteration)
        self._write(_encoder.encode_lines([record]))

    def add_timeline(self, record: TimelineRecord) -> None:
        """Add a timeline; where there are too many, every second one goes. Raises OSError."""
        if len(self._timelines) >= MOST_TIMELINES:
            self._timeline_stride *= 2
            self._timelines = [iteration for iteration in self._timelines if self.wants_timeline(iteration)]
            self._thin_out()
        self._write(_encoder.encode_lines([record]))
        self._timelines.append(record.iteration)

    def read(self) -> bytes:
        """Everything added, for the store; raises OSError."""
        return read_bounded(self.path) if self._is_begun else b""

    def _is_kept(self, iteration: int, stride: int) -> bool:
        if self._first is None:
            self._first = iteration
        return (iteration - self._first) % stride == 0

    def _thin_out(self) -> None:
        """Write the file anew, with the iterations of the present strides alone."""
        if not self._is_begun:
            return
        kept: dict[bool, list[bytes]] = {True: [], False: []}
        for line in read_bounded(self.path).splitlines(keepends=True):
            record = _decoder.decode(line)
            sized = isinstance(record, IterationRecord | StageRecord)
            stride = self._stride if sized else self._timeline_stride
            if isinstance(record, EvaluationRecord):
                is_kept = record.iteration in self._evaluations[record.split]
            else:
                is_kept = isinstance(record, RunRecord | MemoryRecord) or self._is_kept(record.iteration, stride)
            if is_kept:
                kept[sized].append(line)
        replace_bytes(self.path, b"".join(kept[False] + kept[True]))
        self._bytes = sum(map(len, kept[True]))

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab" if self._is_begun else "wb") as file:
            self._is_begun = True
            file.write(data)


def decode_records(data: bytes, *, origin: str) -> list[Record]:
    """The records in a file's bytes; raises DataError naming `origin` and the line that is none.

    A last line without its end is passed over: its writer is at it, or has been killed.
    """
    whole, _, _ = data.rpartition(b"\n")
    records: list[Record] = []
    for number, line in enumerate(whole.splitlines(), start=1):
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
