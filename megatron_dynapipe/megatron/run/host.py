"""What a planned run asks of the program that trains.

Programs are hosts: Megatron's loop started by an entry script (`entry/script.py`) or in a patched checkout
(`entry/checkout.py`), and Megatron-Bridge's loop (`megatron_dynapipe.bridge`). Each builds its model, and calls the run
in place of Megatron's schedule function.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.data.collate import RequiredFields
from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.execution.megatron_stage import ForwardStep
from megatron_dynapipe.megatron.execution.step_functions import MakeBatch, batch_maker, required_fields
from megatron_dynapipe.megatron.flags.run_config import Sources
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.settings import PlanInputs


class Host(Protocol):
    """The program that trains, on this rank; a host derives from it. A run asks in this order, on all ranks alike.

    Attributes:
        sources: where plans and samples come from.
        files: digests of the dataset's files.
        device: this rank's.
        dtype: the type of the states that cross stage boundaries.
        weights_dtype: the type of parameters.
        seed: draws dropouts.
        log_interval: iterations between two lines of the log.
        names_tasks: whether step functions report losses by task.
        reserves_all_memory: whether all that plans may use of a GPU has been taken before the first iteration.
        corrects: whether plans follow how long passes take.
        flops_of_label: floating-point operations that a position without a label leaves out.
    """

    sources: Sources
    files: Mapping[str, FileDigests]
    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype
    seed: int
    log_interval: int
    names_tasks: bool = False
    reserves_all_memory: bool = False
    corrects: bool = True
    flops_of_label: float = 0.0

    def inputs(self, control: ControlGroup, models: Sequence[nn.Module], *, evaluates: bool) -> PlanInputs:
        """What plans are made from, from where training goes on; `evaluates`: the run begins with an evaluation."""

    def opened(self, control: ControlGroup, inputs: PlanInputs) -> None:
        """All ranks have agreed on the inputs; groups of stages, planners and iterators are made next."""
        return

    def required(self, models: Sequence[nn.Module]) -> RequiredFields:
        """Which of a micro-batch's tensors this rank's stage reads."""
        return required_fields(models)

    def about(self, inputs: PlanInputs, models: Sequence[nn.Module]) -> Mapping[str, str]:
        """The run in words, for the head of its report."""

    def make_batch(self, models: Sequence[nn.Module]) -> MakeBatch:
        """The function that makes of host tensors what the step function takes."""
        return batch_maker(models)

    def corrected(self, correction: Correction) -> None:
        """Plans count on corrected costs from an iteration on."""
        return

    def begin_iteration(self) -> None:
        """An iteration has its plan, and begins."""
        return

    def wrapped(self, step: ForwardStep) -> ForwardStep:
        """The step function that is called in place of the loop's."""
        return step

    def check(self, losses: Sequence[dict[str, Tensor]]) -> None:
        """Look at the losses of an iteration; raises where training must end."""
        return

    def count_lengths(self, item: PlannedIteration) -> bool:
        """Tell the program the real lengths of an iteration's samples; whether it counts FLOPs by them."""
        return False

    def trained(self, number: int, plan: Callable[[], str]) -> None:
        """Iteration `number`, from 1, has been issued; `plan` says what was planned and measured, once it has run."""
        return

    def write_metrics(self, item: PlannedIteration, events: Sequence[Event]) -> None:
        """Give an iteration's numbers to the program's writers."""
        return

    def write_task_losses(self, losses: Mapping[str, float], iteration: int) -> None:
        """Give the program's writers the loss of each task since the last line of the log."""
        return
