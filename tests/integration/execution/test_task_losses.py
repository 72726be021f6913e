"""The losses of tasks add up to the loss, whatever the micro-batches."""

import torch

from megatron_dynapipe.integration.execution.step_functions import masked_loss
from megatron_dynapipe.integration.execution.task_losses import named_losses
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME


def test_losses_by_name() -> None:
    output = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]])
    tasks = torch.tensor([[2, 2, 0, 0], [0, 0, 0, 0]])
    whole = [masked_loss(mask, output, tasks)[2]]
    apart = [masked_loss(mask[row], output[row], tasks[row])[2] for row in (1, 0)]
    for reports in (whole, apart):
        (named,) = named_losses(reports, ["a", "b", "c"])
        assert {name: part.tolist() for name, part in named.items()} == {
            LOSS_NAME: [16.0, 5.0],
            f"{LOSS_NAME} a": [15.0, 3.0],
            f"{LOSS_NAME} b": [0.0, 0.0],
            f"{LOSS_NAME} c": [1.0, 2.0],
        }


def test_without_micro_batches_every_task_is_named() -> None:
    (named,) = named_losses([{LOSS_NAME: torch.zeros(2)}], ["a", "b"])
    assert list(named) == [LOSS_NAME, f"{LOSS_NAME} a", f"{LOSS_NAME} b"]
    assert named_losses([], ["a"]) == []
