"""A run read from its folder of records: iterations over all replicas, where stages' time went, some timelines."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.instructions import Payload, RecvWait, SendStart
from megatron_dynapipe.core.plan import BACKWARD, FORWARD, TRANSFER, Event, Timeline, time_by_kind
from megatron_dynapipe.core.units import Shape
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
from megatron_dynapipe.report.starts import RANK_FILE, earlier_starts
from megatron_dynapipe.report.summary import joined

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
        tokens: that counted in the last evaluation, by split and the loss's name.
        stages: records of every stage of the last start, all its replicas and iterations.
        timelines: in the order of iterations and replicas, if every stage has handed one in.
        memory: the ranks' of the last start; empty without GPUs.
    """

    starts: tuple[RunRecord, ...]
    iterations: tuple[IterationRecord, ...]
    losses: Mapping[str, Mapping[int, float]]
    stages: Mapping[int, Sequence[StageRecord]]
    timelines: tuple[RecordedTimeline, ...]
    evaluations: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    tokens: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    memory: tuple[MemoryRecord, ...] = ()

    @property
    def run(self) -> RunRecord | None:
        """The last start; None in folders of a run that has not recorded one."""
        return self.starts[-1] if self.starts else None

    @property
    def last_timelines(self) -> list[RecordedTimeline]:
        """The timelines of the last start: earlier ones may have had other stages."""
        first = -1 if self.run is None else self.run.first_iteration
        return [timeline for timeline in self.timelines if timeline.iteration >= first]

    @property
    def maximum(self) -> Shape:
        """Lengths that a run without planning would pad every sample to; by default the longest that occur."""
        if self.run is not None:
            return self.run.maximum
        shapes = [shape for record in self.iterations for shape in record.shapes]
        lengths = [(shape.input_length, shape.target_length) for shape in shapes] or [(1, 0)]
        return Shape(1, max(pair[0] for pair in lengths), max(pair[1] for pair in lengths))


def read_run(folder: Path, *, last_start: bool = False) -> Run:
    """Read every rank's records of every start, or of the last; what a later one trained again counts as it trained it.

    Raises:
        DataError: there are no records of iterations, or a line is not a record.
    """
    starts = [_read_start(path) for path in (*([] if last_start else earlier_starts(folder)), folder)]
    begun = [run.first_iteration if run else 0 for run, _ in starts]
    ends = [min(begun[at + 1 :], default=None) for at in range(len(starts))]
    iterations: list[IterationRecord] = []
    trained: list[StageRecord] = []
    evaluated: list[EvaluationRecord] = []
    timelines: list[RecordedTimeline] = []
    for (run, records), end in zip(starts, ends, strict=True):
        kept = [record for record in records if _is_before(record, end)]
        iterations += joined([record for record in kept if isinstance(record, IterationRecord)])
        trained += [record for record in kept if isinstance(record, StageRecord)]
        evaluated += [record for record in kept if isinstance(record, EvaluationRecord)]
        timelines += _timelines([record for record in kept if isinstance(record, TimelineRecord)], run)
    if not iterations:
        raise DataError(f"expected records of at least one iteration, found none in {folder}")
    stages: dict[int, list[StageRecord]] = defaultdict(list)
    _, last_records = starts[-1]
    for record in last_records:
        if isinstance(record, StageRecord):
            stages[record.stage].append(record)
    return Run(
        starts=tuple(run for run, _ in starts if run is not None),
        iterations=tuple(iterations),
        losses=_losses(trained),
        stages=dict(sorted(stages.items())),
        timelines=tuple(timelines),
        evaluations=_evaluations(evaluated),
        memory=tuple(record for record in last_records if isinstance(record, MemoryRecord)),
        tokens={split: _tokens([r for r in evaluated if r.split == split]) for split in {r.split for r in evaluated}},
    )


def _read_start(folder: Path) -> tuple[RunRecord | None, list[Record]]:
    """One start's facts and all its records; ranks that a run of fewer ranks does not have are an earlier run's."""
    files = sorted((int(m[1]), path) for path in folder.glob("rank-*.jsonl") if (m := RANK_FILE.fullmatch(path.name)))
    if not files:
        raise DataError(
            f"expected records of a run, rank-0.jsonl and others, found none in {folder}",
            hint="name the folder that --dynapipe-report-dir gave the run",
        )
    records: list[Record] = []
    run: RunRecord | None = None
    for rank, path in files:
        if run is not None and rank >= run.world_size:
            continue
        read = read_records(path)
        run = next((record for record in read if isinstance(record, RunRecord)), run)
        records += read
    return run, records


def _is_before(record: Record, end: int | None) -> bool:
    """Whether a record is of what was done before iteration `end`, at which a later start began."""
    if end is None or isinstance(record, RunRecord | MemoryRecord):
        return True
    return record.iteration <= end if isinstance(record, EvaluationRecord) else record.iteration < end


def stage_medians(run: Run) -> dict[int, dict[str, float]]:
    """The parts of every stage's time in an iteration, in ns: medians over iterations and replicas.

    The bubble is the wait for a peer that had not begun to send, 0 where no timeline was recorded. The first iteration,
    which pays for starting up, is left out if there are more.
    """
    shares: dict[int, list[float]] = defaultdict(list)
    for timeline in run.last_timelines:
        for stage, share in enumerate(bubble_shares(timeline.measured)):
            shares[stage].append(share)
    medians = {}
    for stage, records in run.stages.items():
        begin = min(record.iteration for record in records)
        timed = [record for record in records if record.iteration > begin] or records
        parts = ("forward", "backward", "transfer", "other", "plan_wait", "reduction", "optimizer", "between")
        row = {part: float(median(getattr(record, f"{part}_ns") for record in timed)) for part in parts}
        row["bubble"] = row["transfer"] * (median(shares[stage]) if shares[stage] else 0.0)
        row["transfer"] -= row["bubble"]
        row["between"] = max(row["between"] - row["reduction"] - row["optimizer"], 0.0)
        medians[stage] = row
    return medians


def bubble_shares(timeline: Timeline) -> list[float]:
    """Per stage, how much of its transfer time it waited for a peer that had not begun to send: the bubble.

    What is left is the transfer itself. Times of all stages are on one clock. A message is found by its micro-batch:
    several chunks' messages of one micro-batch between two stages come in the order in which they were sent.
    """
    sent: dict[tuple[int, int, Payload, int], deque[int]] = defaultdict(deque)
    for stage, events in enumerate(timeline):
        for event in events:
            if isinstance(send := event.instruction, SendStart):
                sent[stage, send.peer, send.payload, send.micro_batch].append(event.start_ns)
    return [_bubble_share(stage, events, sent) for stage, events in enumerate(timeline)]


def _bubble_share(stage: int, events: Sequence[Event], sent: dict[tuple[int, int, Payload, int], deque[int]]) -> float:
    waited = 0
    for event in events:
        if isinstance(receive := event.instruction, RecvWait):
            starts = sent[receive.peer, stage, receive.payload, receive.micro_batch]
            if starts:
                waited += max(min(starts.popleft(), event.end_ns) - event.start_ns, 0)
    whole = time_by_kind(events)[TRANSFER]
    return waited / whole if whole else 0.0


def _evaluations(records: Sequence[EvaluationRecord]) -> dict[str, dict[str, dict[int, float]]]:
    splits = dict.fromkeys(record.split for record in records)
    return {split: _losses([record for record in records if record.split == split]) for split in splits}


def _tokens(records: Sequence[EvaluationRecord]) -> dict[str, int]:
    """The tokens of one of the last evaluations; all of them ran the same samples."""
    last = max(record.iteration for record in records)
    counts: dict[str, float] = defaultdict(float)
    for record in records:
        if record.iteration == last:
            for name, (_, tokens) in record.losses.items():
                counts[name] += tokens
    return {name: round(count) for name, count in counts.items()}


def _losses(records: Sequence[StageRecord | EvaluationRecord]) -> dict[str, dict[int, float]]:
    """Means over the tokens of all replicas, in the order of iterations."""
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for record in sorted(records, key=lambda record: record.iteration):
        for name, (total, tokens) in record.losses.items():
            sums[name][record.iteration][0] += total
            sums[name][record.iteration][1] += tokens
    return {
        name: {iteration: total / tokens for iteration, (total, tokens) in by_iteration.items() if tokens}
        for name, by_iteration in sums.items()
    }


def _timelines(records: Sequence[TimelineRecord], run: RunRecord | None) -> tuple[RecordedTimeline, ...]:
    """The timelines in which every stage is there: ranks are read while they write."""
    groups: dict[tuple[int, int], dict[int, TimelineRecord]] = defaultdict(dict)
    for record in records:
        groups[record.iteration, record.replica][record.stage] = record
    stages = run.stages if run else max((len(group) for group in groups.values()), default=0)
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
