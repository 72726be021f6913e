"""Plans that a run has dumped as a run that takes as long as they predict, for a report without measurements."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.plan.dumps import dump_paths, read_dump
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry
from megatron_dynapipe.plan.memory import activation_peak_bytes
from megatron_dynapipe.report.records import MOST_TIMELINES, IterationRecord, RunRecord, StageRecord
from megatron_dynapipe.report.run import RecordedTimeline, Run
from megatron_dynapipe.report.stage_times import BACKWARD, FORWARD, time_by_kind
from megatron_dynapipe.units import BatchLayout, Shape


def planned_run(folder: Path) -> Run:
    """The training iterations of a folder of dumps (`plan.dumps`).

    Raises:
        DataError: there are none, or a file is no plan.
    """
    paths = dump_paths(folder)
    if not paths:
        raise DataError(f"expected plans of training iterations in {folder / 'train'}, found none")
    iterations: list[IterationRecord] = []
    stages: dict[int, list[StageRecord]] = defaultdict(list)
    timelines: list[RecordedTimeline] = []
    drawn_every = -(-len(paths) // MOST_TIMELINES)
    for place, path in enumerate(paths):
        plan = read_dump(path)
        iterations.append(_iteration(plan))
        for record in _stages(plan):
            stages[record.stage].append(record)
        if place % drawn_every == 0:
            timelines += _timelines(plan)
    return Run(
        run=_run(plan, iterations),
        iterations=tuple(iterations),
        losses={},
        stages=dict(sorted(stages.items())),
        timelines=tuple(timelines),
    )


def _run(first: IterationPlan, iterations: Sequence[IterationRecord]) -> RunRecord:
    shapes = [shape for each in iterations for shape in each.shapes] or [Shape(1, 1)]
    longest = Shape(1, max(each.input_length for each in shapes), max(each.target_length for each in shapes))
    return RunRecord(
        world_size=first.pipeline_stages * len(first.replicas),
        stages=first.pipeline_stages,
        memory_limit_bytes=first.memory_limit_bytes,
        model_state_bytes=first.model_state_bytes,
        maximum=longest,
    )


def _iteration(plan: IterationPlan) -> IterationRecord:
    batches = [each for replica in plan.replicas for each in replica.micro_batches]
    return IterationRecord(
        iteration=plan.iteration,
        measured_ns=plan.totals.predicted_ns,
        predicted_ns=plan.totals.predicted_ns,
        plan_wait_ns=0,
        totals=plan.totals,
        shapes=tuple(each.shape for each in batches),
        packed=sum(each.layout is BatchLayout.PACKED for each in batches),
    )


def _stages(plan: IterationPlan) -> list[StageRecord]:
    records = []
    for place, replica in enumerate(plan.replicas):
        for stage, listed in enumerate(replica.stages):
            spent = time_by_kind(listed.predicted)
            passes = spent[FORWARD] + spent[BACKWARD]
            entry = StageEntry.of(plan, place, stage, plan_digest="")
            records.append(
                StageRecord(
                    iteration=plan.iteration, replica=place, stage=stage, forward_ns=spent[FORWARD],
                    backward_ns=spent[BACKWARD], transfer_ns=max(plan.totals.predicted_ns - passes, 0), other_ns=0,
                    plan_wait_ns=0, between_ns=0, planned_activation_bytes=activation_peak_bytes(entry),
                )
            )  # fmt: skip
    return records


def _timelines(plan: IterationPlan) -> list[RecordedTimeline]:
    timelines = []
    for place, replica in enumerate(plan.replicas):
        planned = tuple(stage.predicted for stage in replica.stages)
        timelines.append(RecordedTimeline(iteration=plan.iteration, replica=place, planned=planned, measured=planned))
    return timelines
