"""A run read from its folder of records: iterations over all replicas, where stages' time went, some timelines.

A job that goes on after nodes came or went keeps the records of its earlier starts:

    RUN_DIR/start-1/rank-0.jsonl …     iterations 0 to 19, of four ranks
    RUN_DIR/start-2/rank-0.jsonl …     iterations 20 to 44, of two
    RUN_DIR/rank-0.jsonl …             the start that runs now, or ran last: from iteration 40, saved by the second
"""

import re
import shutil
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
)
from megatron_dynapipe.plan.timeline import Event, Timeline
from megatron_dynapipe.report.records import (
    EvaluationRecord,
    IterationRecord,
    MemoryRecord,
    Record,
    RunRecord,
    StageRecord,
    TimelineRecord,
    read_records,
)
from megatron_dynapipe.report.summary import joined
from megatron_dynapipe.units import Shape

FORWARD, BACKWARD, TRANSFER, OTHER = "forward", "backward", "transfer", "other"
"""Kinds of instructions, for where time went."""
PASSES = (FORWARD, BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTimeline:
    """One replica's iteration: planned and measured events of every stage, from the iteration's first instruction."""

    iteration: int
    replica: int
    planned: Timeline
    measured: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's records.

    Attributes:
        starts: what the iterations of each start have in common, in order.
        iterations: one record each, in order, of all starts.
        losses: sum over tokens ÷ tokens, by the loss's name and iteration.
        evaluations: the same of evaluations, by split; iterations are those trained before them.
        stages: records of every stage of the last start, all its replicas and iterations.
        timelines: in the order of iterations and replicas; those of which every stage has handed one in.
    """

    starts: tuple[RunRecord, ...]
    iterations: tuple[IterationRecord, ...]
    losses: Mapping[str, Mapping[int, float]]
    stages: Mapping[int, Sequence[StageRecord]]
    timelines: tuple[RecordedTimeline, ...]
    evaluations: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)

    @property
    def run(self) -> RunRecord | None:
        """The last start; None in folders of a run that has not recorded one."""
        return self.starts[-1] if self.starts else None

    @property
    def last_timelines(self) -> list[RecordedTimeline]:
        """Those of the last start: earlier ones may have had other stages."""
        return [each for each in self.timelines if self.run is None or each.iteration >= self.run.first_iteration]

    @property
    def maximum(self) -> Shape:
        """Lengths that a run without planning would pad every sample to; by default the longest that occur."""
        if self.run is not None:
            return self.run.maximum
        shapes = [shape for each in self.iterations for shape in each.shapes]
        lengths = [(shape.input_length, shape.target_length) for shape in shapes] or [(1, 0)]
        return Shape(1, max(each[0] for each in lengths), max(each[1] for each in lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMedians:
    """Where a stage's time went in an iteration: medians over iterations and replicas, in nanoseconds."""

    stage: int
    forward: float
    backward: float
    bubble: float
    """Waiting for a peer that had not begun to send; 0 where no timeline was recorded."""
    transfer: float
    other: float
    plan_wait: float
    between: float


def read_run(folder: Path) -> Run:
    """Read every rank's records of every start; what a later start trained again counts as it trained it.

    Raises:
        DataError: there are no records of iterations, or a line is not a record.
    """
    starts = [_read_start(each) for each in (*earlier_starts(folder), folder)]
    begun = [start.run.first_iteration if start.run else 0 for start in starts]
    ends = [min(begun[at + 1 :], default=None) for at in range(len(starts))]
    iterations: list[IterationRecord] = []
    trained: list[StageRecord] = []
    evaluated: list[EvaluationRecord] = []
    timelines: list[RecordedTimeline] = []
    for start, end in zip(starts, ends, strict=True):
        kept = [each for each in start.records if _is_before(each, end)]
        iterations += joined([each for each in kept if isinstance(each, IterationRecord)])
        trained += [each for each in kept if isinstance(each, StageRecord)]
        evaluated += [each for each in kept if isinstance(each, EvaluationRecord)]
        timelines += _timelines([each for each in kept if isinstance(each, TimelineRecord)], start.run)
    if not iterations:
        raise DataError(f"expected records of at least one iteration, found none in {folder}")
    stages: dict[int, list[StageRecord]] = defaultdict(list)
    for each in starts[-1].records:
        if isinstance(each, StageRecord):
            stages[each.stage].append(each)
    return Run(
        starts=tuple(start.run for start in starts if start.run is not None),
        iterations=tuple(iterations),
        losses=_losses(trained),
        stages=dict(sorted(stages.items())),
        timelines=tuple(timelines),
        evaluations=_evaluations(evaluated),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    run: RunRecord | None
    records: list[Record]


def _read_start(folder: Path) -> _Start:
    """One start's records; ranks that a run of fewer ranks does not have are an earlier run's."""
    found = sorted((int(m[1]), path) for path in folder.glob("rank-*.jsonl") if (m := RANK_FILE.fullmatch(path.name)))
    if not found:
        raise DataError(
            f"expected records of a run, rank-0.jsonl and others, found none in {folder}",
            hint="name the folder that --dynapipe-report-dir gave the run",
        )
    records: list[Record] = []
    run: RunRecord | None = None
    for rank, path in found:
        if run is not None and rank >= run.world_size:
            continue
        read = read_records(path)
        run = next((each for each in read if isinstance(each, RunRecord)), run)
        records += read
    return _Start(run, records)


def _is_before(record: Record, end: int | None) -> bool:
    """Whether a record is of what was done before iteration `end`, at which a later start began."""
    if end is None or isinstance(record, RunRecord | MemoryRecord):
        return True
    return record.iteration <= end if isinstance(record, EvaluationRecord) else record.iteration < end


def stage_medians(run: Run) -> list[StageMedians]:
    """Where every stage's time went; the first iteration, which pays for starting up, is left out if there are more."""
    shares: dict[int, list[float]] = defaultdict(list)
    for timeline in run.last_timelines:
        for stage, share in enumerate(bubble_shares(timeline.measured)):
            shares[stage].append(share)
    medians = []
    for stage, records in run.stages.items():
        begin = min(each.iteration for each in records)
        timed = [each for each in records if each.iteration > begin] or records
        transfer = median(each.transfer_ns for each in timed)
        bubble = transfer * (median(shares[stage]) if shares[stage] else 0.0)
        medians.append(
            StageMedians(
                stage=stage,
                forward=median(each.forward_ns for each in timed),
                backward=median(each.backward_ns for each in timed),
                bubble=bubble,
                transfer=transfer - bubble,
                other=median(each.other_ns for each in timed),
                plan_wait=median(each.plan_wait_ns for each in timed),
                between=median(each.between_ns for each in timed),
            )
        )
    return medians


def kind_of(instruction: Instruction) -> str:
    """What an instruction's time counts to."""
    match instruction:
        case Forward():
            return FORWARD
        case Backward() | BackwardInput() | BackwardWeight():
            return BACKWARD
        case SendStart() | SendWait() | RecvStart() | RecvWait():
            return TRANSFER
        case _:
            return OTHER


def time_by_kind(events: Sequence[Event]) -> Mapping[str, int]:
    """Nanoseconds of a stage's instructions, by kind; 0 for a kind that does not occur."""
    spent: dict[str, int] = defaultdict(int)
    for event in events:
        spent[kind_of(event.instruction)] += event.end_ns - event.start_ns
    return spent


def bubble_shares(timeline: Timeline) -> list[float]:
    """Per stage, how much of its transfer time it waited for a peer that had not begun to send: the bubble.

    What is left is the transfer itself. Times of all stages are on one clock. A message is found by its micro-batch:
    those of one micro-batch between two stages, of several chunks, come in the order in which they were sent.
    """
    sent: dict[tuple[int, int, Payload, int], deque[int]] = defaultdict(deque)
    for stage, events in enumerate(timeline):
        for event in events:
            if isinstance(each := event.instruction, SendStart):
                sent[stage, each.peer, each.payload, each.micro_batch].append(event.start_ns)
    return [_bubble_share(stage, events, sent) for stage, events in enumerate(timeline)]


def _bubble_share(stage: int, events: Sequence[Event], sent: dict[tuple[int, int, Payload, int], deque[int]]) -> float:
    waited = 0
    for event in events:
        if isinstance(each := event.instruction, RecvWait):
            starts = sent[each.peer, stage, each.payload, each.micro_batch]
            if starts:
                waited += max(min(starts.popleft(), event.end_ns) - event.start_ns, 0)
    whole = time_by_kind(events)[TRANSFER]
    return waited / whole if whole else 0.0


def _evaluations(records: Sequence[EvaluationRecord]) -> dict[str, dict[str, dict[int, float]]]:
    splits = dict.fromkeys(each.split for each in records)
    return {split: _losses([each for each in records if each.split == split]) for split in splits}


def _losses(records: Sequence[StageRecord | EvaluationRecord]) -> dict[str, dict[int, float]]:
    """Means over the tokens of all replicas, in the order of iterations."""
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for record in sorted(records, key=lambda each: each.iteration):
        for name, (total, tokens) in record.losses.items():
            sums[name][record.iteration][0] += total
            sums[name][record.iteration][1] += tokens
    return {
        name: {iteration: total / tokens for iteration, (total, tokens) in by_iteration.items() if tokens}
        for name, by_iteration in sums.items()
    }


def _timelines(records: Sequence[TimelineRecord], run: RunRecord | None) -> tuple[RecordedTimeline, ...]:
    """Those of which every stage is there: ranks are read while they write."""
    groups: dict[tuple[int, int], dict[int, TimelineRecord]] = defaultdict(dict)
    for record in records:
        groups[record.iteration, record.replica][record.stage] = record
    stages = run.stages if run else max((len(each) for each in groups.values()), default=0)
    return tuple(
        _timeline([group[stage] for stage in range(stages)])
        for _, group in sorted(groups.items())
        if set(group) == set(range(stages))
    )


def _timeline(records: Sequence[TimelineRecord]) -> RecordedTimeline:
    start = min((event.start_ns for record in records for event in record.measured), default=0)
    return RecordedTimeline(
        iteration=records[0].iteration,
        replica=records[0].replica,
        planned=tuple(record.planned for record in records),
        measured=tuple(
            tuple(Event(e.instruction, e.start_ns - start, e.end_ns - start) for e in record.measured)
            for record in records
        ),
    )


RANK_FILE = re.compile(r"rank-([0-9]{1,9})\.jsonl")
_START = re.compile(r"start-([0-9]{1,9})")
_SAME = ("model", "data")
"""What two starts of one run have in common, of `RunRecord.about`."""


def earlier_starts(folder: Path) -> list[Path]:
    """The folders of the earlier starts, in order."""
    found = [(int(m[1]), path) for path in folder.glob("start-*") if (m := _START.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def keep_earlier(folder: Path, begun: RunRecord) -> None:
    """Make room for the records of a start: those of the starts that it goes on from stay, others are deleted.

    Raises:
        OSError: the files cannot be moved.
    """
    files = [path for path in folder.glob("rank-*.jsonl") if RANK_FILE.fullmatch(path.name)]
    before = earlier_starts(folder)
    if not _goes_on(folder / "rank-0.jsonl", begun):
        for path in files:
            path.unlink()
        for each in before:
            shutil.rmtree(each)
        return
    last = int(before[-1].name.removeprefix("start-")) if before else 0
    target = folder / f"start-{last + 1}"
    target.mkdir()
    for path in files:
        path.replace(target / path.name)


def _goes_on(records: Path, begun: RunRecord) -> bool:
    """Whether a start resumes the run that left these records."""
    if begun.first_iteration == 0:
        return False
    try:
        earlier = next((each for each in read_records(records) if isinstance(each, RunRecord)), None)
    except DataError:
        return False
    return (
        earlier is not None
        and earlier.first_iteration <= begun.first_iteration
        and all(earlier.about.get(name) == begun.about.get(name) for name in _SAME)
    )
