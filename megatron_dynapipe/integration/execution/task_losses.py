"""The loss of each task in an evaluation, in the form of Megatron's loss reports: it adds up, logs and draws them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME

BY_TASK = "by task"
"""In a micro-batch's report: float32[tasks seen so far, 2], sum and number of the losses of each task."""
_SOME = 1e-30
"""In place of no token: nothing beside one."""


def sums_by_task(losses: torch.Tensor, mask: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
    """Sum and number of the losses that count, by task.

    Args:
        losses: float32[n], 0 where one does not count.
        mask: float32[n], 1 where one counts.
        tasks: int64[n] or of a shape of as many elements; their maximum sets the rows of the result.
    """
    places = tasks.reshape(-1)
    sums = losses.new_zeros(int(places.max()) + 1, 2)
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
        tasks, mask = batch.get("tasks"), batch.get("loss_mask")
        if tasks is None or mask is None:
            return output, loss_function

        def with_sums(losses: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            loss, tokens, report = loss_function(losses, *arguments, **keywords)
            flat = mask.reshape(-1).float()
            return (
                loss,
                tokens,
                report | {BY_TASK: sums_by_task(losses.detach().reshape(-1).float() * flat, flat, tasks)},
            )

        return output, with_sums

    return step


def named_losses(
    reports: Sequence[dict[str, torch.Tensor]],
    tasks: Sequence[str],
    *,
    group: torch.distributed.ProcessGroup | None = None,
    replicas: torch.distributed.ProcessGroup | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The reports of an evaluation's micro-batches as one, with a loss for every task of its samples, by its name.

    Ranks name the same tasks, whichever of them they have evaluated: Megatron reduces name after name. One that none of
    them has is left out, and the whole loss is 0 where no token counts: Megatron would log either as not a number.

    Args:
        reports: of each micro-batch; (sum, number) by name, which add up, or means, of which the mean is taken.
        tasks: all names.
        group: whose first rank alone knows the tasks, and tells the others.
        replicas: over which Megatron reduces.
    """
    if not reports:
        return []
    whole = {name: _joined([report[name] for report in reports]) for name in reports[0] if name != BY_TASK}
    sums = whole[LOSS_NAME].new_zeros(len(tasks), 2)
    for report in reports:
        if (reported := report.get(BY_TASK)) is not None:
            sums[: len(reported)] += reported
    if group is not None and len(tasks):
        torch.distributed.broadcast(sums, torch.distributed.get_global_rank(group, 0), group)
    counts = sums[:, 1].clone()
    if replicas is not None and len(tasks):
        torch.distributed.all_reduce(counts, group=replicas)
    parts = zip(tasks, sums, counts.tolist(), strict=True)
    return [whole | {f"{LOSS_NAME} {task}": part for task, part, count in parts if count}]


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([value.reshape(-1) for value in values])
    if stacked.shape[1] != 2:
        return stacked.mean(0)
    total = stacked.sum(0)
    return torch.stack([total[0], total[1].clamp(min=_SOME)])
