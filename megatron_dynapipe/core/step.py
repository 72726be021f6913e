"""One step of one rank, whatever model it trains.

    agree ──► [passes and transfers of the list] ──► sum the losses ──► finish: reduce the gradients
      └ under way while the first passes run; the first transfer waits for it

`StepRunner` stands below Megatron's training loop, `MegatronPipeline`, `Pipeline` and `UnevenPipeline`. They give it
a list, what runs its passes, and what finishes the gradients; `runtime.rank` gives it transports, a clock and a
watchdog.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_dynapipe.core.executor import Dtypes, PipelineExecutor, Trace
from megatron_dynapipe.core.instructions import Forward
from megatron_dynapipe.core.passes import PassContext, StageModel, pass_handlers
from megatron_dynapipe.core.plan import StagePlan


class Agreement(Protocol):
    """An agreement of all ranks that is under way while the first passes run (`runtime.control_group`)."""

    is_settled: bool

    def settle(self) -> None:
        """Return once every rank is known to be able to run the step; else raise, on every rank."""
        ...

    def then(self, function: Callable[[], None]) -> None:
        """Call a function once the agreement is settled."""
        ...


class Sums(Protocol):
    """Adds up over all ranks (`runtime.control_group`)."""

    def start_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to add up `values`; what is returned waits for the sums."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The sums of a step's losses, the same on every rank, and when this rank's instructions ran.

    Attributes:
        loss: sum of all losses.
        count: how many losses that are; both are 0 if a runner does not add them up.
        trace: when this rank's instructions ran.
    """

    loss: float
    count: float
    trace: Trace

    @property
    def mean_loss(self) -> float:
        """Loss over count; 0 for a step of nothing."""
        return self.loss / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of a rank in one step.

    Attributes:
        plan: this rank's instruction list.
        model: runs the list's passes.
        dtypes: the types of a transfer's tensors, if they are not all the runner's.
        agreement: waits until all ranks say that they can run the step; None if they agreed before.
        around: entered while the list runs.
        finish: reduces the gradients after a training step's list; it may wait for the sums over all ranks.
    """

    plan: StagePlan
    model: StageModel
    dtypes: Dtypes | None = None
    agreement: Agreement | None = None
    forward_only: bool = False
    around: AbstractContextManager[object] = field(default_factory=nullcontext)
    finish: Callable[["PendingTotals"], None] = lambda _: None


class StepRunner:
    """Runs the steps of one rank, each together with all others'.

    Args:
        executor: runs lists together with the other stages.
        alone: makes an executor that runs a list without them: it sends nothing and receives zeros.
        gate: takes what the next transfer has to wait for, or None.
        device: this rank's.
        stage, stages: this rank's place in its pipeline.
        chunks: virtual stages of each rank.
        dtype: the type of the tensors that cross stage boundaries.
        sums: adds up losses over all ranks; None where somebody else does it.
        close: gives back what the executor uses other than memory.

    Attributes:
        is_warm: kernels are loaded, so that no list waits for one.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        *,
        alone: Callable[[], PipelineExecutor],
        gate: Callable[[Callable[[], None] | None], None],
        device: torch.device,
        stage: int,
        stages: int,
        chunks: int,
        dtype: torch.dtype,
        sums: Sums | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.device = device
        self.stage = stage
        self.stages = stages
        self.chunks = chunks
        self.dtype = dtype
        self.close = close
        self.is_warm = False
        self._executor = executor
        self._alone = alone
        self._gate = gate
        self._sums = sums

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call a function before the first training step, once, on a device that loads kernels when they are used."""
        if self.device.type == "cuda" and not self.is_warm:
            run()
        self.is_warm = True

    def run_alone(self, step: Step) -> None:
        """Run a step's list without the other stages: it sends nothing and receives zeros."""
        with step.around:
            self._alone().execute(step.plan, pass_handlers(self._context(step)), dtypes=step.dtypes)

    def run(self, step: Step) -> StepTotals:
        """Run a step to its end.

        Raises:
            DynaPipeError: a rank cannot run it; the same message on all of them.
            Exception: whatever a pass raised, with a note that names the instruction.
        """
        context = self._context(step)
        agreement = step.agreement
        totals = PendingTotals(self._sums, step.model)

        def start_totals() -> None:
            if not context.losses_left and (agreement is None or agreement.is_settled):
                totals.start()

        if self.device.type == "cpu":  # elsewhere the host would wait for the device
            context.on_last_loss = start_totals
        if agreement is not None:
            agreement.then(context.on_last_loss)
        self._gate(None if agreement is None else agreement.settle)
        with step.around:
            trace = self._executor.execute(step.plan, pass_handlers(context), dtypes=step.dtypes)
        if agreement is not None:
            agreement.settle()
        if not step.forward_only:
            step.finish(totals)
        loss, count = totals.wait()
        return StepTotals(loss=loss, count=count, trace=trace)

    def _context(self, step: Step) -> PassContext:
        context = PassContext(
            model=step.model,
            stage=self.stage,
            stages=self.stages,
            chunks=self.chunks,
            forward_only=step.forward_only,
        )
        passes = [instruction for instruction in step.plan.instructions if isinstance(instruction, Forward)]
        context.losses_left = sum(context.is_last(instruction.chunk) for instruction in passes)
        return context


class PendingTotals:
    """The sums over all ranks of a step's losses and their number, on the way while passes run."""

    def __init__(self, sums: Sums | None, model: StageModel) -> None:
        self._sums = sums
        self._model = model
        self._sum: Callable[[], torch.Tensor] | None = None

    def start(self) -> None:
        """Start the sum: no loss of this rank is still to come."""
        if self._sums is not None and self._sum is None:
            self._sum = self._sums.start_sum(self._model.totals().detach().cpu())

    def wait(self) -> tuple[float, float]:
        """Sum of the losses, and their number."""
        self.start()
        if self._sum is None:
            return 0.0, 0.0
        loss, count = self._sum().tolist()
        return float(loss), float(count)
