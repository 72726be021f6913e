"""Records of each iteration on this rank, and how rank 0 gathers it for the report at the run's end."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.executor import Mark
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import BatchLayout, in_mb
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.supply.predictions import PredictionWatch
from megatron_dynapipe.megatron.supply.stage_record import Between, EvaluationLosses, HostLosses, stage_record
from megatron_dynapipe.outputs import warn
from megatron_dynapipe.processes import package_path, run_guarded
from megatron_dynapipe.report.records import (
    EvaluationRecord,
    IterationRecord,
    MemoryRecord,
    RecordFile,
    RunRecord,
    StageRecord,
    TimelineRecord,
)
from megatron_dynapipe.report.starts import keep_earlier
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.service.corrections import Correction, in_force

_REPORT_S = 120.0
"""Deadline of the summary at a run's end."""


class Recorder:
    """Records of one rank.

    Recording never changes training or its exit status: the first failure is printed as a warning.

    The first stage of each replica records every iteration; every stage records where its time went, and the timelines
    of some iterations and of the last one. Traces and losses are read one iteration late, so that reading them never
    waits for the device.

    Args:
        folder: where records and pictures go; the records of another run are replaced.
        run: what all iterations have in common; rank 0 records it.
        collect: takes every rank's records to rank 0, where it returns them by rank; nodes may share no folder.
        rank: this process's.
        tensor_rank: its tensor-parallel rank; one rank of a stage speaks for it.
        write_metrics: gives an iteration's numbers to Megatron's writers.
        memory: what the device's allocator has counted; None where none counts.
        reserves_all: the allocator was given the plan's limit ahead of tensors, so that fragments cannot be told.

    Attributes:
        at_peak_ns: what the record of the iteration that was added last is to say.
    """

    at_peak_ns = 0

    def __init__(
        self,
        folder: Path,
        run: RunRecord,
        collect: Callable[[bytes], Sequence[bytes]],
        *,
        rank: int,
        tensor_rank: int = 0,
        write_metrics: Callable[[PlannedIteration, Sequence[Event]], None],
        memory: Callable[[], MemoryCounts | None] = lambda: None,
        reserves_all: bool = False,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._tensor_rank = tensor_rank
        self._run = run
        self._collect = collect
        self._write_metrics = write_metrics
        self._predictions = PredictionWatch()
        self._memory = memory
        self._reserves_all = reserves_all
        self._corrections: list[Correction] = []
        self._peaks: MemoryCounts | None = None
        self._retries = 0
        self._has_run = False
        self._latest: tuple[PlannedIteration, Trace, HostLosses] | None = None
        self._previous: Between | None = None
        self._reduced: Mark | None = None
        self._stepped: Mark | None = None
        self._last_iteration: int | None = None
        self._evaluations = EvaluationLosses()
        self._task_losses: Callable[[], Mapping[str, tuple[float, float]]] | None = None
        self._file = RecordFile(folder / f"rank-{rank}.jsonl")
        self._has_warned = False
        if rank == 0:
            with self._never_failing("keep the records of earlier starts"):
                keep_earlier(folder, run)

    def add(self, item: PlannedIteration, trace: Trace, losses: Sequence[Mapping[str, torch.Tensor]] = ()) -> None:
        """Keep an iteration that has been issued to the device, and the last stage's loss reports of it."""
        self.flush(last=False)
        self._latest = item, trace, HostLosses(losses)
        self._reduced = trace.moment()
        self._last_iteration = item.entry.iteration

    def begin_evaluation(self, split: str) -> None:
        """An evaluation begins; of several of one state the last counts."""
        self._evaluations.begin(split)

    def add_step(self) -> None:
        """Megatron's optimizer has stepped, after the iteration that was added last."""
        if self._latest is not None:
            self._stepped = self._latest[1].moment()

    def add_start(self, spent: str) -> None:
        """Say in this start's record where the time until its first iteration's end went."""
        self._run = msgspec.structs.replace(self._run, about={**self._run.about, "start": spent})

    def add_correction(self, correction: Correction) -> None:
        """Costs are corrected from an iteration on."""
        self._corrections.append(correction)

    def add_evaluation(self, split: str, losses: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Keep the last stage's loss reports of an iteration of an evaluation; empty elsewhere."""
        if self._tensor_rank == 0:
            self._evaluations.add(split, losses)

    def add_task_losses(self, read: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
        """Keep the losses of tasks since the last line of the log, which are read one iteration late; by name."""
        if self._tensor_rank == 0:
            self._task_losses = read

    def report(self) -> str | None:
        """Hand in this rank's records; on rank 0 gather all, and return what `megatron-dynapipe report` says of them.

        That draws the last iteration, too, in a process of its own.
        """
        self.flush()
        content = b""
        with self._never_failing("read this rank's records"):
            content = self._file.read()
        summary = None
        collected = [content]
        with self._never_failing("gather the records of all ranks"):
            collected = [*self._collect(content)]
        if self._rank != 0:
            return None
        for rank, data in enumerate(collected):
            if rank != self._rank:
                with self._never_failing(f"write the records of rank {rank}"):
                    (self._folder / f"rank-{rank}.jsonl").write_bytes(data)
        if any(collected):
            with self._never_failing("sum up the records of all ranks"):
                summary = _told(self._folder)
        return summary and f"{summary}\npage of the run: `megatron-dynapipe report {self._folder}` writes it"

    @contextlib.contextmanager
    def _never_failing(self, doing: str) -> Iterator[None]:
        """Whatever fails in the block, training and its exit status are as without records; warns once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a full disk, a picture that cannot be drawn, a store that is gone
            if not self._has_warned:
                warn(f"rank {self._rank} cannot {doing}, and goes on without: {type(error).__name__}: {error}")
            self._has_warned = True

    def flush(self, *, last: bool = True) -> None:
        """Write the iteration that was added last, by default as this start's last, and the evaluations after it."""
        self._flush_iteration(last=last)
        with self._never_failing("record an evaluation"):
            done = 0 if self._last_iteration is None else self._last_iteration + 1
            read = self._task_losses
            self._task_losses = None
            if read is not None and (losses := read()):
                self._file.add_evaluation(EvaluationRecord(iteration=done, split="train", losses=dict(losses)))
            for record in self._evaluations.take(done):
                self._file.add_evaluation(record)

    def _flush_iteration(self, *, last: bool) -> None:
        if self._latest is None:
            return
        (item, trace, losses), self._latest = self._latest, None
        events = trace.events()
        memory = self._memory()  # before metrics reset the peaks
        with self._never_failing("record an iteration"):
            self._write(item, events, losses, memory, last=last)

    def _write(
        self,
        item: PlannedIteration,
        events: Sequence[Event],
        losses: HostLosses,
        memory: MemoryCounts | None,
        *,
        last: bool,
    ) -> None:
        self._say_retries(memory)
        self._write_metrics(item, events)
        if self._tensor_rank != 0:
            return
        records: list[IterationRecord | StageRecord] = []
        if item.entry.stage_plan.stage == 0:
            records.append(self._iteration_record(item, events, memory))
        if not self._has_run and self._rank == 0:
            self._file.add(self._run)
            self._has_run = True
        records.append(stage_record(item, events, losses.read(), memory, previous=self._previous))
        self._previous = self._between(events)
        self._file.add_iteration(*records)
        self._say_predictions(item, events)
        if last or self._file.wants_timeline(item.entry.iteration):
            timeline = TimelineRecord(
                iteration=item.entry.iteration,
                replica=item.entry.replica,
                stage=item.entry.stage_plan.stage,
                planned=item.entry.stage_plan.predicted,
                measured=tuple(events),
            )
            self._file.add_timeline(timeline)
        if memory is not None:
            self._count_memory(memory, last=last)

    def _between(self, events: Sequence[Event]) -> Between | None:
        """The moments after the list of an iteration that is written now."""
        reduced = self._reduced
        stepped = self._stepped
        self._reduced = self._stepped = None
        if not events:
            return None
        list_ns = events[-1].end_ns
        reduced_ns = list_ns if reduced is None else reduced()
        return Between(list_ns=list_ns, reduced_ns=reduced_ns, stepped_ns=reduced_ns if stepped is None else stepped())

    def _iteration_record(
        self, item: PlannedIteration, events: Sequence[Event], memory: MemoryCounts | None
    ) -> IterationRecord:
        correction = in_force(self._corrections, item.entry.iteration)
        return IterationRecord(
            iteration=item.entry.iteration,
            corrections=() if correction is None else correction.percents,
            measured_ns=events[-1].end_ns - events[0].start_ns if events else 0,
            predicted_ns=item.entry.totals.predicted_ns,
            plan_wait_ns=round(item.waited_seconds * 1e9),
            totals=item.entry.totals,
            shapes=tuple(batch.shape for batch in item.entry.micro_batches),
            packed=sum(batch.layout is BatchLayout.PACKED for batch in item.entry.micro_batches),
            at_peak_ns=self.at_peak_ns,
            allocated_bytes=0 if memory is None else memory.allocated_bytes,
            reserved_bytes=0 if memory is None else memory.reserved_bytes,
            allocator_retries=0 if memory is None else memory.retries,
        )

    def _count_memory(self, memory: MemoryCounts, *, last: bool) -> None:
        if self._reserves_all:
            return
        peaks = self._peaks = memory if self._peaks is None else self._peaks.with_peaks_of(memory)
        if last:
            record = MemoryRecord(
                rank=self._rank,
                allocated_bytes=peaks.allocated_bytes,
                reserved_bytes=peaks.reserved_bytes,
                retries=peaks.retries,
            )
            self._file.add(record)

    def _say_predictions(self, item: PlannedIteration, events: Sequence[Event]) -> None:
        """Warn once, on rank 0, where measured costs have predicted other times for long."""
        predicted = item.entry.stage_plan.predicted
        if self._rank == 0 and not self._run.computed_costs and events and predicted:
            predicted_ns, measured_ns = (times[-1].end_ns - times[0].start_ns for times in (predicted, events))
            if (said := self._predictions.add(predicted_ns, measured_ns, item.entry.family)) is not None:
                warn(said)

    def _say_retries(self, memory: MemoryCounts | None) -> None:
        """Warn where the allocator has been out of memory since the last iteration and found some after all."""
        if memory is None or memory.retries <= self._retries:
            return
        self._retries = memory.retries
        reserved, used = in_mb(memory.reserved_bytes, memory.allocated_bytes)
        warn(
            f"rank {self._rank}'s allocator has given its cache back {memory.retries} times to find"
            f" memory, holding {reserved} for tensors of {used}; each time waits for the device: lower"
            " --dynapipe-device-memory-limit, or add --dynapipe-reserve-all-memory"
        )


def _told(folder: Path) -> str:
    """What `megatron-dynapipe report` prints of the start whose records lie in a folder, in which it draws pictures.

    Raises:
        DataError: why it could not.
    """
    command = [sys.executable, "-P", "-m", "megatron_dynapipe", "report", str(folder), "--end-of-run"]
    status, lines = run_guarded(command, deadline_s=_REPORT_S, env=os.environ | {"PYTHONPATH": package_path()})
    if status != 0:
        raise DataError("\n".join(lines[-3:]) or f"not done after {_REPORT_S:.0f} s")
    return "\n".join(lines)
