"""The loss of each task: in an evaluation in the form of Megatron's loss reports, which it adds up, logs and draws; in
training added up on the device until an iteration is logged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_dynapipe.megatron.equip.told import NOTHING, Told
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME

BY_TASK = "by task"
"""In a micro-batch's report: float32[tasks seen so far, 2], sum and number of the losses of each task."""
_SOME = 1e-30
"""In place of no token: nothing next to one."""


def sums_by_task(
    losses: torch.Tensor, mask: torch.Tensor, tasks: torch.Tensor, rows: int | None = None
) -> torch.Tensor:
    """Sum and number of the losses that count, by task.

    Args:
        losses: float32[n], 0 where one does not count.
        mask: float32[n], 1 where one counts.
        tasks: int64[n] or of a shape of as many elements.
        rows: the result's; None looks for the last task, for which the host waits for a device.
    """
    places = tasks.reshape(-1)
    sums = losses.new_zeros(int(places.max()) + 1 if rows is None else rows, 2)
    sums[:, 0].index_add_(0, places, losses)
    sums[:, 1].index_add_(0, places, mask)
    return sums


def with_task_sums(forward_step: ForwardStep) -> ForwardStep:
    """A checkout's own step function, whose loss function also reports sums by task where the batch has tasks.

    Its model's output is the loss of every position: [b, s], as Megatron's GPT returns it.
    """

    def step(batches: Iterator[DeviceBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        output, loss_function = forward_step(iter((batch,)), model)
        tasks = batch.get("tasks")
        mask = batch.get("loss_mask")
        if tasks is None or mask is None:
            return output, loss_function

        def with_sums(losses: torch.Tensor, *arguments: object, **keywords: object) -> Any:
            loss, tokens, report = loss_function(losses, *arguments, **keywords)
            told: Told = batch.get("told", NOTHING)
            flat = (mask if told.counts is None else told.counts).reshape(-1).float()
            if told.counts is not None:
                losses = losses.t().reshape(-1)[told.rows]
            counted = losses.detach().reshape(-1).float() * flat
            return loss, tokens, report | {BY_TASK: sums_by_task(counted, flat, tasks, batch.get("task_rows"))}

        return output, with_sums

    return step


def named_losses(
    reports: Sequence[dict[str, torch.Tensor]],
    tasks: Sequence[str],
    *,
    replicas: torch.distributed.ProcessGroup | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The reports of an evaluation's micro-batches as one, with a loss for every task of its samples, by its name.

    Ranks name the same tasks, whichever of them they have evaluated: Megatron reduces name after name. One that none of
    them has is left out, and the whole loss is 0 where no token counts: Megatron would log either as not a number.

    Args:
        reports: each micro-batch's; (sum, number) by name, which add up, or means, whose mean is taken.
        tasks: all names.
        replicas: over which Megatron reduces.
    """
    if not reports:
        return []
    whole = {name: _joined([report[name] for report in reports]) for name in reports[0] if name != BY_TASK}
    sums = whole[LOSS_NAME].new_zeros(len(tasks), 2)
    for report in reports:
        if (reported := report.get(BY_TASK)) is not None:
            sums[: len(reported)] += reported
    counts = sums[:, 1].clone()
    if replicas is not None and len(tasks):
        torch.distributed.all_reduce(counts, group=replicas)
    parts = zip(tasks, sums, counts.tolist(), strict=True)
    return [whole | {f"{LOSS_NAME} {task}": part for task, part, count in parts if count}]


class TaskLosses:
    """The losses of tasks in training since the last line of the log, added up on the last stage's device.

    Args:
        tasks: all names; nothing is added up for none.
        is_last: whether this rank is of the last stage.
    """

    def __init__(self, tasks: Sequence[str], *, is_last: bool) -> None:
        self._tasks = tasks
        self._is_last = is_last
        self._sums: torch.Tensor | None = None
        self._copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def add(self, reports: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Add an iteration's reports; the same ones without tasks, which Megatron's log does not know."""
        if self._tasks and self._is_last and reports:
            if self._sums is None:
                self._sums = torch.zeros(len(self._tasks), 2, dtype=torch.float64, device=reports[0][LOSS_NAME].device)
            for report in reports:
                if (sums := report.get(BY_TASK)) is not None:
                    self._sums[: len(sums)] += sums
        return [{name: value for name, value in report.items() if name != BY_TASK} for report in reports]

    def finish(self, replicas: torch.distributed.ProcessGroup) -> None:
        """Add up over replicas, once for all tasks, and begin anew."""
        if self._sums is None:
            return
        both = torch.stack([self._sums.t()] * 2)
        torch.distributed.all_reduce(both[1], group=replicas)
        event = torch.cuda.Event() if both.is_cuda else None
        self._sums = None
        self._copied = (both.to("cpu", non_blocking=True), event)
        if event is not None:
            event.record()

    def read(self, *, whole: bool) -> dict[str, tuple[float, float]]:
        """Sum and number by task, of those that occurred until `finish`: of this replica, or of all of them."""
        if self._copied is None:
            return {}
        both, event = self._copied
        if event is not None:
            event.synchronize()
        totals, counts = both[int(whole)].tolist()
        named = zip(self._tasks, totals, counts, strict=True)
        return {task: (total, count) for task, total, count in named if count}


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([value.reshape(-1) for value in values])
    if stacked.shape[1] != 2:
        return stacked.mean(0)
    total = stacked.sum(0)
    return torch.stack([total[0], total[1].clamp(min=_SOME)])
