"""Folders of records, as runs leave them."""

from pathlib import Path

from megatron_dynapipe.core.instructions import Backward, Forward, RecvWait
from megatron_dynapipe.core.plan import BACKWARD, FORWARD, OTHER, TRANSFER, Event, IterationPlan, time_by_kind
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.report.records import IterationRecord, RecordFile, RunRecord, StageRecord, TimelineRecord
from tests.helpers.plans import make_plan

MS = 1_000_000


def measured_events(plan: IterationPlan, stage: int, *, start_ns: int = 0) -> tuple[Event, ...]:
    """A stage's whole list: passes as predicted; the last receive before a pass, or what stands there, waits for it."""
    stage_plan = plan.replicas[0].stages[stage]
    upcoming = list(stage_plan.predicted)
    listed = stage_plan.instructions
    now, events = 0, []
    for step, instruction in enumerate(listed):
        begin = now
        if isinstance(instruction, Forward | Backward):
            now = upcoming.pop(0).end_ns
        elif upcoming:
            ahead = next(i for i in range(step, len(listed)) if isinstance(listed[i], Forward | Backward))
            waits = [i for i in range(step, ahead) if isinstance(listed[i], RecvWait)]
            if (isinstance(instruction, RecvWait) and waits == [step]) or (not waits and step == ahead - 1):
                now = max(upcoming[0].start_ns, now)
        events.append(Event(instruction, start_ns + begin * MS, start_ns + now * MS))
    return tuple(events)


def run_record(*, stages: int = 2, first: int = 0, data: str = "d") -> RunRecord:
    """What a start says of itself."""
    return RunRecord(
        world_size=stages, stages=stages, memory_limit_bytes=100 * MS, maximum=Shape(1, 512),
        model_state_bytes=(30 * MS,) * stages, first_iteration=first, about={"model": "m", "data": data},
    )  # fmt: skip


def write_run(
    folder: Path, *, iterations: int = 6, stages: int = 2, micro_batches: int = 4, first: int = 0, start_ms: int = 0
) -> Path:
    """Records of one replica; a prediction's nanosecond is a measured millisecond.

    The first iteration takes `start_ms` longer than its passes.
    """
    plan = make_plan((micro_batches,), stages, method="1f1b", seed=3)
    shapes = tuple(micro_batch.shape for micro_batch in plan.replicas[0].micro_batches)
    for stage in range(stages):
        file = RecordFile(folder / f"rank-{stage}.jsonl")
        if stage == 0:
            file.add(run_record(stages=stages, first=first))
        for iteration in range(first, first + iterations):
            events = measured_events(plan, stage, start_ns=10_000 * MS * iteration)
            spent = time_by_kind(events)
            records: list[IterationRecord | StageRecord] = [
                StageRecord(
                    iteration=iteration, replica=0, stage=stage, forward_ns=spent[FORWARD],
                    backward_ns=spent[BACKWARD], transfer_ns=spent[TRANSFER], other_ns=spent[OTHER], plan_wait_ns=MS,
                    between_ns=5 * MS, planned_activation_bytes=(20 + stage) * MS, allocated_bytes=40 * MS,
                    reserved_bytes=60 * MS, reduction_ns=2 * MS, optimizer_ns=1 * MS,
                    losses={"lm loss": (400.0 / (1 + iteration), 40.0)} if stage == stages - 1 else {},
                )
            ]  # fmt: skip
            if stage == 0:
                record = IterationRecord(
                    iteration=iteration,
                    measured_ns=events[-1].end_ns - events[0].start_ns + (iteration == first) * start_ms * MS,
                    predicted_ns=plan.totals.predicted_ns * MS, plan_wait_ns=MS, totals=plan.totals, shapes=shapes,
                )  # fmt: skip
                records.insert(0, record)
            file.add_iteration(*records)
            if file.wants_timeline(iteration) or iteration == first + iterations - 1:
                planned = tuple(
                    Event(e.instruction, e.start_ns * MS, e.end_ns * MS)
                    for e in plan.replicas[0].stages[stage].predicted
                )
                file.add_timeline(
                    TimelineRecord(iteration=iteration, replica=0, stage=stage, planned=planned, measured=events)
                )
    return folder
