"""Running one iteration's micro-batches on this rank: agree, lay out, fill the list, execute, add up."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.agreement import GatedTransport, StepAgreement, TotalsOverRanks
from megatron_dynapipe.modules.boundary import Layout, Part, signature
from megatron_dynapipe.modules.handlers import LossFunction, StageHandlers
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.lists import boundary_of, fill, lists_without_shapes
from megatron_dynapipe.plan.instructions import Instruction, Payload, RecvStart, SendStart
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry, StagePlan
from megatron_dynapipe.runtime import PipelineExecutor, TorchTransport, Trace, platform_of, watched
from megatron_dynapipe.runtime.process_groups import backend_of, make_groups, warm_up

Plan = IterationPlan | StageEntry
"""What says in which order passes run: a whole iteration's plan, or this rank's share of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """Micro-batches by names of the model's arguments, and their plan, if there is one."""

    micro_batches: Sequence[Batch]
    plan: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an iteration came to, the same on every rank but for outputs and trace.

    Attributes:
        loss: sum of the losses / count.
        count: of everything that the losses are of.
        outputs: the model's, on the last stage, where they were kept.
        labels: of each, where outputs were kept.
        trace: of this rank's list.
    """

    loss: float
    count: float
    outputs: Sequence[Any]
    labels: Sequence[Batch]
    trace: Trace


class Runner:
    """Every rank makes it at the same point, and calls `run` together with the others.

    Args:
        part: of this rank.
        loss_fn: of a model's output and the micro-batch.
        autocast: dtype that operations are cast to, if any.
        timeout_s: deadline of every transfer.
    """

    def __init__(self, part: Part, loss_fn: LossFunction, *, autocast: torch.dtype | None, timeout_s: float) -> None:
        self._part, self._loss_fn, self._autocast = part, loss_fn, autocast
        self._layouts: Sequence[Layout] = ()
        self._filled: tuple[Any, Sequence[Instruction], StagePlan] | None = None
        device, ranks = part.device, part.ranks
        groups = make_groups(ranks.pipelines, chunks=part.chunks, backend=backend_of(device), timeout_s=timeout_s)
        assert groups is not None, "every rank is in a pipeline"
        warm_up(groups, device)
        with ExitStack() as resources:
            self._transport = GatedTransport(TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s))
            self._executor = PipelineExecutor(
                self._transport,
                platform_of(device),
                stages=part.stages,
                dtype=torch.float32,
                watch=resources.enter_context(watched(device, deadline_s=timeout_s, rank=ranks.control.rank)),
                dtypes=self._dtypes,
            )
            weakref.finalize(self, resources.pop_all().close)  # the watchdog's thread ends with this object

    def run(
        self,
        work: Callable[[], Work],
        *,
        schedule: str,
        scale: float | None = None,
        forward_only: bool = False,
        keep_outputs: bool = False,
    ) -> Outcome:
        """Run micro-batches through this rank's virtual stages; gradients are added to the parameters'.

        Args:
            work: makes them; its error is raised on every rank.
            schedule: order of passes where there is no plan.
            scale: factor of the loss that gradients are taken of.
            forward_only: no backward passes.
            keep_outputs: what the model returns is kept.
        """
        agreement, made, planned = self._begin(work)
        layouts = self._part.layouts(made.micro_batches, self._autocast)
        handlers = StageHandlers(
            self._part,
            made.micro_batches,
            layouts,
            self._loss_fn,
            autocast=self._autocast,
            scale=scale,
            forward_only=forward_only,
            keep_outputs=keep_outputs,
        )
        self._layouts = layouts
        totals = TotalsOverRanks(self._part.ranks)
        if self._part.device.type == "cpu":  # elsewhere the host would wait for the device
            agreement.then(lambda: handlers.when_totalled(totals.start))
        self._transport.agreement = agreement
        instructions = self._list(layouts, planned, schedule, forward_only=forward_only)
        trace = self._executor.execute(instructions, handlers.table)
        agreement.settle()
        loss, count = totals.wait(handlers.totals)
        kept = [handlers.kept[row] for row in sorted(handlers.kept)]
        return Outcome(
            loss=loss / count if count else 0.0,
            count=count,
            outputs=[output for output, _ in kept],
            labels=[labels for _, labels in kept],
            trace=trace,
        )

    def _begin(self, work: Callable[[], Work]) -> tuple[StepAgreement, Work, Sequence[Instruction] | None]:
        """The micro-batches, and the instructions of their plan, if there is one.

        What is new to a rank of a pipeline is new to all of them, and found out while all look on. Else the first
        passes run while ranks still agree; the first transfer waits for it.
        """
        part, error = self._part, None
        made, planned, new = Work((), None), None, False
        try:
            made = work()
            planned = None if made.plan is None else _planned(made.plan, part, len(made.micro_batches))
            new = not part.knows(made.micro_batches, self._autocast)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must hear of it)
            error = raised
        identity = repr([_identity(made.plan), *map(signature, made.micro_batches)])
        find_out = partial(part.find_out, made.micro_batches, self._autocast)
        agreement = StepAgreement(part.ranks, identity, error=error, new=new, find_out=find_out)
        if error is not None or new:
            agreement.settle()
        return agreement, made, planned

    def _list(
        self, layouts: Sequence[Layout], planned: Sequence[Instruction] | None, schedule: str, *, forward_only: bool
    ) -> StagePlan:
        """The list to execute; that of the iteration before, where it was of the same."""
        part, instructions = self._part, planned or ()
        if planned is None and layouts:
            lists = lists_without_shapes(part.stages, part.chunks, len(layouts), schedule, forward_only=forward_only)
            instructions = lists[part.stage]
        key = (tuple(map(id, layouts)), id(instructions))
        if self._filled is None or self._filled[0] != key:
            self._filled = key, instructions, fill(instructions, layouts, stage=part.stage, stages=part.stages)
        return self._filled[2]

    def _dtypes(self, transfer: SendStart | RecvStart) -> Sequence[torch.dtype]:
        boundary = boundary_of(transfer, self._layouts, stage=self._part.stage, stages=self._part.stages)
        return boundary.dtypes if transfer.payload is Payload.ACTIVATION else boundary.gradient_dtypes


def _identity(plan: Plan | None) -> tuple[Any, ...] | None:
    return None if plan is None else (plan.iteration, plan.totals)


def _planned(plan: Plan, part: Part, micro_batches: int) -> Sequence[Instruction]:
    """The instructions of this rank; raises ConfigError for a plan of another layout or other micro-batches."""
    if (plan.pipeline_stages, plan.chunks) != (part.stages, part.chunks):
        raise ConfigError(
            f"expected a plan for {part.stages} stages of {part.chunks} chunks, got one for {plan.pipeline_stages} of "
            f"{plan.chunks}"
        )
    if isinstance(plan, StageEntry):
        mine = plan
    else:  # of all replicas, or of this one alone
        mine = StageEntry.of(plan, part.replica if len(plan.replicas) > 1 else 0, part.stage, plan_digest="")
    if len(mine.micro_batches) != micro_batches:
        raise ConfigError(
            f"expected the {len(mine.micro_batches)} micro-batches that the plan is of, got {micro_batches}"
        )
    return mine.stage_plan.instructions
