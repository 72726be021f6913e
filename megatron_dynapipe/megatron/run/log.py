"""What a run says of itself on this rank: lines of iterations, losses of tasks, FLOPs, records, the report."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import NS_PER_MS, Shape
from megatron_dynapipe.costing.devices import peak_flops
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.execution.task_losses import TaskLosses, named_losses
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
from megatron_dynapipe.megatron.run.host import Host
from megatron_dynapipe.megatron.supply.recorder import Recorder
from megatron_dynapipe.outputs import say
from megatron_dynapipe.report.records import RunRecord
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.memory import memory_counts
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs
from megatron_dynapipe.store.entry import StageEntry


class RunLog:
    """The log and the records of a run that has been started. Made on all ranks together.

    Args:
        host: the program that trains.
        inputs: what its plans are made from, as on all ranks.
        control: the group of all ranks.
        about: the run in words.
        longest: the shape that a run without planning would pad every sample to.
        stage: this rank's.
        stages: the number of the pipeline's stages.
        measured: takes what was measured of an iteration, once it is known.

    Attributes:
        latest: the latest training iteration; None before the first.
    """

    def __init__(
        self,
        host: Host,
        inputs: PlanInputs,
        control: ControlGroup,
        *,
        about: Mapping[str, str],
        longest: Shape,
        stage: int,
        stages: int,
        measured: Callable[[PlannedIteration, Sequence[Event]], None] | None = None,
    ) -> None:
        self._host = host
        self._measured = measured
        self._inputs = inputs
        self._is_computed = isinstance(inputs.costs, AnalyticCosts)
        self._stage = "last stage" if stage == stages - 1 else "first stage" if stage == 0 else f"stage {stage + 1}"
        names = read_meta(Path(inputs.data_folder)).tasks if host.names_tasks else ()
        self._tasks: Sequence[str] = names if len(names) > 1 else ()
        self._task_losses = TaskLosses(self._tasks, is_last=stage == stages - 1)
        self._peak_flops = _peak_flops(host)
        self._knows_lengths = False
        self.latest: PlannedIteration | None = None
        self._trace: Trace | None = None
        self._labels: torch.Tensor | None = None
        self._reports: list[dict[str, torch.Tensor]] = []
        planner = inputs.planner
        self._recorder = Recorder(
            host.sources.report_folder,
            RunRecord(
                world_size=torch.distributed.get_world_size(),
                stages=stages,
                memory_limit_bytes=planner.memory_limit_bytes,
                model_state_bytes=planner.model_state_bytes or (),
                maximum=longest,
                first_iteration=inputs.splits[0].first_iteration,
                computed_costs=self._is_computed,
                samples=read_meta(Path(inputs.data_folder)).samples,
                evaluated={
                    split.name: split.evaluation * split.sampler.samples_per_iteration
                    for split in inputs.splits
                    if split.evaluation is not None and split.sampler.tokens_per_iteration is None
                },
                about=dict(about),
            ),
            control.collect,
            rank=control.rank,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            write_metrics=self._write_metrics,
            memory=functools.partial(memory_counts, host.device),
            reserves_all=host.reserves_all_memory,
        )

    def _write_metrics(self, item: PlannedIteration, events: Sequence[Event]) -> None:
        self._host.write_metrics(item, events)
        if self._measured is not None:
            self._measured(item, events)

    def add_correction(self, correction: Correction) -> None:
        """Costs are corrected from an iteration on."""
        self._recorder.add_correction(correction)

    def say_on_first(self, text: str) -> None:
        """Say a line on rank 0."""
        if torch.distributed.get_rank() == 0:
            say(text)

    def add_start(self, spent: str | None) -> None:
        """Take the parts of the time since the launch after the first iteration; None if they have been told."""
        if spent is not None:
            self._recorder.add_start(spent)
            say(f"the start took {spent}")

    def add(
        self,
        item: PlannedIteration,
        trace: Trace,
        losses: list[dict[str, torch.Tensor]],
        labels: torch.Tensor | None,
    ) -> list[dict[str, torch.Tensor]]:
        """Take in a training iteration that has run.

        Args:
            item: what was planned.
            trace: what was measured.
            losses: reports of this rank's micro-batches, with every task's losses.
            labels: whether any position had a label, on the last stage; read once Megatron has waited for the loss.

        Returns:
            The reports for Megatron.
        """
        self.latest = item
        self._trace = trace
        self._labels = labels
        reports = self._reports = self._task_losses.add(losses)
        self._recorder.add(item, trace, reports)
        if (item.entry.iteration + 1) % self._host.log_interval == 0:
            # One reduction over replicas, for all tasks.
            self._task_losses.finish(parallel_state.get_data_parallel_group(with_context_parallel=True))
            self._recorder.add_task_losses(self._read_task_losses)
        self._knows_lengths = self._host.count_lengths(item)
        return reports

    def stepped(self) -> None:
        """Megatron has stepped its optimizer after the latest training iteration."""
        self._recorder.add_step()

    def _read_task_losses(self) -> dict[str, tuple[float, float]]:
        """The losses of this replica, by the names that evaluations give them, after the whole."""
        by_task = self._task_losses.read(whole=False)
        whole = {LOSS_NAME: (sum(loss for loss, _ in by_task.values()), sum(count for _, count in by_task.values()))}
        return whole | {f"{LOSS_NAME} {task}": sums for task, sums in by_task.items()} if by_task else {}

    def begin_evaluation(self, split: str) -> None:
        """Megatron begins an evaluation on a split."""
        self._recorder.begin_evaluation(split)

    def add_evaluation(self, split: str, losses: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """The loss reports of an evaluation's iteration, with every task's, for Megatron and the records."""
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        named = named_losses(losses, self._tasks, replicas=replicas)
        self._recorder.add_evaluation(split, named)
        return named

    @property
    def samples(self) -> int:
        """Samples of the latest training iteration; one must have run."""
        assert self.latest is not None, "no iteration has been trained"
        return self.latest.entry.totals.samples

    def flops(self, count: float) -> float:
        """Floating-point operations of the latest training iteration, from their number over whole samples.

        Positions without labels do not count in the last MLP and the head.
        """
        left_out = 0 if self.latest is None else self.latest.entry.totals.left_out
        executed = count - left_out * self._host.flops_of_label
        if self._peak_flops and self._knows_lengths:
            self._recorder.at_peak_ns = round(executed / self._peak_flops * 1e9)
        return executed

    def text(self) -> str:
        """The latest training iteration's plan in the form of Megatron's log line; empty before the first.

        Times are from the first pass of this rank's stage to its last one; the summary and the pictures have all
        stages'. The loop has waited for the loss, so they are known.
        """
        if self.latest is None or self._trace is None:
            return ""
        totals = self.latest.entry.totals
        micro_batches = "+".join(map(str, totals.micro_batches))
        cut = f" samples cut: {totals.cut_samples} |" if totals.cut_samples else ""
        in_tokens = self._inputs.splits[0].sampler.tokens_per_iteration is not None
        size = f" tokens: {totals.real_tokens} |" if in_tokens else ""
        sums = self._task_losses.read(whole=True)
        by_task = {task: total / count for task, (total, count) in sums.items()}
        self._host.write_task_losses(by_task, self.latest.entry.iteration + 1)
        tasks = (" %s: %.6E |" * len(by_task)) % (*chain.from_iterable(by_task.items()),)  # half the time of f-strings
        return (
            f"{size} micro-batches: {micro_batches} | padding efficiency: {totals.padding_efficiency:.3f} |"
            f" {self._stage} predicted (ms): {self._predicted(self.latest.entry)} |"
            f" {self._stage} measured (ms): {self._trace.span_ns() / NS_PER_MS:.1f} |"
            f" plan wait (ms): {self.latest.waited_seconds * 1e3:.1f} |{cut}{self._without_loss()}"
            + (f"\n loss by task |{tasks}" if tasks else "")
        )

    def _without_loss(self) -> str:
        """A word that there is no loss, which Megatron's line leaves out; empty if there is one."""
        if self._labels is not None and not self._labels:
            return " no token of this batch counts |"
        totals = [report[LOSS_NAME].flatten()[0] for report in self._reports if LOSS_NAME in report]
        return "" if not totals or math.isfinite(torch.stack(totals).sum()) else " the loss is not a number |"

    def _predicted(self, entry: StageEntry) -> str:
        """The predicted time of this stage's passes, or that computed costs do not predict this machine."""
        if self._is_computed:
            return "not calibrated"
        events = entry.stage_plan.predicted
        return f"{(events[-1].end_ns - events[0].start_ns if events else 0) / NS_PER_MS:.1f}"

    def flush(self) -> None:
        """Write the records that are left."""
        self._recorder.flush()

    def print_report(self, of_planners: str) -> None:
        """At the run's end: gather every rank's records and print the summary and what planners say, on rank 0."""
        summary = self._recorder.report()
        if summary is not None:
            say("\n".join(filter(None, [summary, of_planners])))


def _peak_flops(host: Host) -> float:
    """Floating-point operations a second of all the run's devices at most; 0 where that is not known."""
    if host.device.type != "cuda" or host.weights_dtype.itemsize != 2:  # data sheets say that of half precision
        return 0.0
    peak = peak_flops(torch.cuda.get_device_name(host.device)) or 0.0
    return peak * torch.distributed.get_world_size()
