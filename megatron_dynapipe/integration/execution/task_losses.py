"""The loss of each task in an evaluation, in the form of Megatron's loss reports: it adds up, logs and draws them."""

from collections.abc import Sequence

import torch

from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME

BY_TASK = "by task"
"""In a micro-batch's report: float32[tasks seen so far, 2], sum and number of the losses of each task."""


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


def named_losses(reports: Sequence[dict[str, torch.Tensor]], tasks: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """The reports of an evaluation's micro-batches as one, with a loss for every task by its name.

    Every rank names all tasks, whatever it has evaluated: Megatron reduces name after name.
    """
    if not reports:
        return []
    total = torch.stack([report[LOSS_NAME] for report in reports]).sum(0)
    sums = total.new_zeros(len(tasks), 2)
    for report in reports:
        if (found := report.get(BY_TASK)) is not None:
            sums[: len(found)] += found
    return [{LOSS_NAME: total} | {f"{LOSS_NAME} {task}": part for task, part in zip(tasks, sums, strict=True)}]
