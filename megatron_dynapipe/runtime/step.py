"""One step of one rank, whatever model it trains.

    agree ──► [passes and transfers of the list] ──► sum the losses ──► finish: reduce the gradients
      └ under way while the first passes run; the first transfer waits for it

`StepRunner` stands below Megatron's training loop, `MegatronPipeline`, `Pipeline` and `UnevenPipeline`. They give it
a list, what runs its passes, and what finishes the gradients.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_dynapipe.plan.instructions import Forward
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.runtime.control_group import ControlGroup, StepAgreement
from megatron_dynapipe.runtime.executor import Dtypes, PipelineExecutor
from megatron_dynapipe.runtime.passes import PassContext, StageModel, pass_handlers
from megatron_dynapipe.runtime.platform import platform_of
from megatron_dynapipe.runtime.trace import Trace
from megatron_dynapipe.runtime.transfers import PooledTransfers
from megatron_dynapipe.runtime.transport import GatedTransport, NoTransport, Transport
from megatron_dynapipe.runtime.watchdog import watched


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """The sums of a step's losses, the same on every rank, and when this rank's instructions ran.

    Attributes:
        loss: sum of all losses.
        count: of what they are sums of; both are 0 for a runner that does not add up.
        trace: of this rank's list.
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
        dtypes: those of a transfer's tensors, where they are not all the runner's.
        agreement: of all ranks, that they can run the step; None where they agreed before.
        around: entered while the list runs.
        finish: reduces the gradients after a training step's list; it may wait for the sums over all ranks.
    """

    plan: StagePlan
    model: StageModel
    dtypes: Dtypes | None = None
    agreement: StepAgreement | None = None
    forward_only: bool = False
    around: AbstractContextManager[object] = field(default_factory=nullcontext)
    finish: Callable[["PendingTotals"], None] = lambda _: None


class StepRunner:
    """Runs the steps of one rank, each together with all others'.

    Args:
        transport: moves tensors between stages.
        device: of this rank.
        stage, stages: this rank's place in its pipeline.
        chunks: virtual stages of each rank.
        dtype: of the tensors that cross stage boundaries.
        deadline_s: of every transfer; on CUDA a watchdog reports a device that is about to miss it.
        control: the group over which losses are added up; None where somebody else does it.

    Attributes:
        is_warm: kernels are loaded, so that no list waits for one.
        close: ends the watchdog's thread; so does the end of this object.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        *,
        stage: int,
        stages: int,
        chunks: int,
        dtype: torch.dtype,
        deadline_s: float,
        control: ControlGroup | None = None,
    ) -> None:
        self.device = device
        self.stage = stage
        self.stages = stages
        self.chunks = chunks
        self.dtype = dtype
        self._control = control
        self._transport = GatedTransport(transport)
        self.is_warm = False
        with ExitStack() as resources:
            self._executor = PipelineExecutor(
                self._transfers(self._transport),
                platform_of(device),
                watch=resources.enter_context(watched(device, deadline_s=deadline_s, rank=dist.get_rank())),
            )
            self.close = weakref.finalize(self, resources.pop_all().close)

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call a function before the first training step, once, on a device that loads kernels when they are used."""
        if self.device.type == "cuda" and not self.is_warm:
            run()
        self.is_warm = True

    def run_alone(self, step: Step) -> None:
        """Run a step's list without the other stages: it sends nothing and receives zeros."""
        executor = PipelineExecutor(self._transfers(NoTransport()), platform_of(self.device))
        with step.around:
            executor.execute(step.plan, pass_handlers(self._context(step)), dtypes=step.dtypes)

    def run(self, step: Step) -> StepTotals:
        """Run a step to its end.

        Raises:
            DynaPipeError: a rank cannot run it; the same message on all of them.
            Exception: whatever a pass raised, with a note that names the instruction.
        """
        context = self._context(step)
        agreement = step.agreement
        totals = PendingTotals(self._control, step.model)

        def start_totals() -> None:
            if not context.losses_left and (agreement is None or agreement.is_settled):
                totals.start()

        if self.device.type == "cpu":  # elsewhere the host would wait for the device
            context.on_last_loss = start_totals
        if agreement is not None:
            agreement.then(context.on_last_loss)
        self._transport.gate = None if agreement is None else agreement.settle
        with step.around:
            trace = self._executor.execute(step.plan, pass_handlers(context), dtypes=step.dtypes)
        if agreement is not None:
            agreement.settle()
        if not step.forward_only:
            step.finish(totals)
        loss, count = totals.wait()
        return StepTotals(loss=loss, count=count, trace=trace)

    def _transfers(self, transport: Transport) -> PooledTransfers:
        return PooledTransfers(transport, self.device, stages=self.stages, dtype=self.dtype)

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

    def __init__(self, control: ControlGroup | None, model: StageModel) -> None:
        self._control = control
        self._model = model
        self._sum: Callable[[], torch.Tensor] | None = None

    def start(self) -> None:
        """Start the sum: no loss of this rank is still to come."""
        if self._control is not None and self._sum is None:
            self._sum = self._control.start_sum(self._model.totals().detach().cpu())

    def wait(self) -> tuple[float, float]:
        """Sum of the losses, and their number."""
        self.start()
        if self._sum is None:
            return 0.0, 0.0
        loss, count = self._sum().tolist()
        return float(loss), float(count)
