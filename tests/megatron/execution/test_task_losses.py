"""The losses of tasks add up to the loss, whatever the micro-batches."""

import torch

from megatron_dynapipe.megatron.execution.step_functions import masked_loss
from megatron_dynapipe.megatron.execution.task_losses import BY_TASK, TaskLosses, named_losses, with_task_sums
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
from tests.helpers.processes import in_ranks


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
            f"{LOSS_NAME} c": [1.0, 2.0],
        }


@in_ranks(2)
def test_replicas_name_the_tasks_that_one_of_them_has(rank):
    """Two replicas with a sample each, of different tasks; a third task has none."""
    torch.distributed.init_process_group("gloo")
    tasks = torch.tensor([[2 * rank, 0]])
    report = masked_loss(torch.tensor([[1.0, 0]]), torch.tensor([[4.0 + rank, 0]]), tasks)[2]
    (named,) = named_losses([report], ["a", "b", "c"], replicas=torch.distributed.group.WORLD)
    own, other = [4 + rank, 1], [0, 0]
    by_task = {f"{LOSS_NAME} a": [own, other][rank], f"{LOSS_NAME} c": [other, own][rank]}
    assert {name: part.tolist() for name, part in named.items()} == {LOSS_NAME: own} | by_task


@in_ranks(2)
def test_training_adds_tasks_up_over_iterations_and_replicas(rank):
    """Two iterations, of one task on the first replica and of two on the second; the third has no samples."""
    torch.distributed.init_process_group("gloo")
    losses = TaskLosses(["a", "b", "c"], is_last=True)
    for _ in range(2):
        report = masked_loss(torch.tensor([[1.0, 1]]), torch.tensor([[4.0 + rank, 1]]), torch.tensor([[rank, 0]]))[2]
        (left,) = losses.add([report])
    losses.finish(torch.distributed.group.WORLD)
    assert list(left) == [LOSS_NAME]
    assert losses.read(whole=False) == [{"a": (10.0, 4.0)}, {"a": (2.0, 2.0), "b": (10.0, 2.0)}][rank]
    assert losses.read(whole=True) == {"a": (12.0, 6.0), "b": (10.0, 2.0)}


def test_without_samples_no_task_is_named() -> None:
    (named,) = named_losses([{LOSS_NAME: torch.zeros(2)}], ["a", "b"])
    assert list(named) == [LOSS_NAME]
    loss, tokens = named[LOSS_NAME]
    assert loss / tokens == 0 and 3 + tokens == 3, "no loss that is not a number, and no weight beside other batches"
    assert named_losses([], ["a"]) == []


def test_a_checkouts_own_loss_function_reports_tasks_too() -> None:
    output, mask = torch.arange(8.0).view(2, 4), torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"tasks": torch.tensor([[2, 2, 0, 0], [0, 0, 0, 0]]), "loss_mask": mask}

    def step(batches, _model):
        return next(batches)["output"], lambda losses: masked_loss(mask, losses)

    _, loss_function = with_task_sums(step)(iter([batch | {"output": output}]), torch.nn.Identity())
    assert loss_function(output)[2][BY_TASK].tolist() == [[15, 3], [0, 0], [1, 2]]
    untold = {"output": output, "tasks": None, "loss_mask": mask}
    _, loss_function = with_task_sums(step)(iter([untold]), torch.nn.Identity())
    assert list(loss_function(output)[2]) == [LOSS_NAME]


def test_other_reports_are_kept() -> None:
    reports = [{LOSS_NAME: torch.tensor([2.0, 1]), "mean": torch.tensor(mean)} for mean in (1.0, 3.0)]
    (named,) = named_losses(reports, [])
    assert {name: value.tolist() for name, value in named.items()} == {LOSS_NAME: [4.0, 2.0], "mean": [2.0]}
