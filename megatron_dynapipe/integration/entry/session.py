"""One run on this rank: its start, its schedule function, its end; a context manager.

    with Session(run, …) as session, replacements.installed(session):
        pretrain(…, session.datasets, …)

Everything is started when Megatron asks for its datasets: by then the process groups exist and a checkpoint has told
where training resumes. Ranks start things in the same order, and a failure on one is raised on all. What the run says
of itself is in `run_log`.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import Shape, input_positions, target_positions
from megatron_dynapipe.data.collate import RequiredFields
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.integration.entry.resume_record import CheckpointRecords, checkpoint_records
from megatron_dynapipe.integration.entry.run_log import RunLog
from megatron_dynapipe.integration.entry.start_clock import StartClock
from megatron_dynapipe.integration.execution.iterations import IterationRunner
from megatron_dynapipe.integration.execution.megatron_stage import ForwardStep
from megatron_dynapipe.integration.execution.step_functions import MakeBatch, batch_maker, check_losses, required_fields
from megatron_dynapipe.integration.execution.transport import open_runner
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.hooks.timers import add_times
from megatron_dynapipe.integration.supply.agreement import AgreedIterator, check_same_run
from megatron_dynapipe.integration.supply.plan_supply import PlanSupply
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.memory import reserve
from megatron_dynapipe.service.planned_splits import drawn_by
from megatron_dynapipe.service.settings import PlanInputs

logger = logging.getLogger(__name__)


class Session:
    """A run on this rank.

    Args:
        run: what was asked for.
        resumed: the inputs of plans from where training goes on; called once Megatron knows where that is.
        required: which tensors this rank's stage reads, once the pipeline exists; by default those that the models do.
        make_batch: host tensors to what the step function takes; by default what the models take.
        wrap_step: makes of Megatron's step function the one that is called.
        clock: of this run's start; by default one that begins with this process.

    Attributes:
        timeout_s: deadline of every wait in an iteration.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        resumed: Callable[[], PlanInputs],
        required: Callable[[], RequiredFields] | None = None,
        make_batch: MakeBatch | None = None,
        wrap_step: Callable[[ForwardStep], ForwardStep] = lambda step: step,
        clock: StartClock | None = None,
    ) -> None:
        self._run = run
        self.timeout_s = run.timeout_s
        self._resumed = resumed
        self._required = required
        self._make_batch = make_batch
        self._wrap_step = wrap_step
        self._clock = clock or StartClock()
        self._device = run.device
        self._records: Sequence[CheckpointRecords] = ()
        self._modules: list[torch.nn.Module] = []
        self._runner: IterationRunner | None = None
        self._resources = ExitStack()
        self._iterators: dict[str, AgreedIterator] = {}
        self._log: RunLog | None = None
        self._supply: PlanSupply | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record_checkpoint()
        if self._log is not None and (kind is None or issubclass(kind, SystemExit)):
            self._log.add_start(self._clock.finish("first iteration"))
            self._log.flush()  # Megatron may have left the loop without a report: on notice, or --exit-interval
        self._resources.__exit__(kind, error, trace)

    def _record_checkpoint(self) -> None:
        """After Megatron may have saved one, between iterations or at the end."""
        if self._iterators and self._control.rank == 0:
            try:
                for records in self._records:
                    records.update()
            except OSError as error:
                logger.warning("cannot write what the last checkpoint was trained on: %s", error)

    def datasets(self, _samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Megatron's dataset provider for `--dataloader-type external`: the iterators of the three splits.

        Chunks of a rank share them; the schedule takes one item per iteration, whatever their number.
        """
        if not self._iterators:
            self._start()
        return self._iterators["train"], self._iterators.get("valid"), self._iterators.get("test")

    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every tensor-parallel rank

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **_shapes: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's schedule function: one planned iteration. The shapes it passes are nominal; the plan's count."""
        if collect_non_loss_data:
            raise ConfigError("DynaPipe runs plans of the loss alone: it cannot collect other outputs of the model")
        models = model if isinstance(model, list) else [model]
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        assert self._runner is not None and self._log is not None, "Megatron has asked for its datasets"
        if self._log.latest is not None:
            self._log.add_start(self._clock.finish("first iteration"))
        item: PlannedIteration = next(iterator)
        self._clock.ends("first plan")
        self._record_checkpoint()
        result, losses, labels = self._runner.run(
            item.entry,
            item.micro_batches.__getitem__,
            models,
            self._wrap_step(forward_step_func),
            longest=self._longest,
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
            on_first_pass=lambda: self._clock.ends("kernels and warm-up"),
        )
        if self._run.checks_losses and not self._run.in_checkout:
            check_losses(losses)
        if forward_only:
            return self._log.add_evaluation(self._split_of(iterator), losses)
        add_times(get_model_config(models[0]).timers, result.trace, item.waited_seconds)
        reports = self._log.add(item, result.trace, losses, labels)
        self._iterators["train"].prepare()
        return reports

    def _split_of(self, iterator: Any) -> str:
        """The split of an iterator that Megatron may have wrapped, to run an item again."""
        inner = getattr(iterator, "iterable", iterator)
        return next(name for name, planned in self._iterators.items() if planned is inner)

    def evaluation(self, data_iterator: Any) -> int:
        """Begin an evaluation on the split of an iterator, or of a list of one for each chunk; its batches."""
        name = self._split_of(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
        assert self._log is not None, "Megatron has asked for its datasets"
        self._log.begin_evaluation(name)
        return next(split.evaluation or 0 for split in self._run.inputs.splits if split.name == name)

    @property
    def shape(self) -> Shape | None:
        """Shape of the micro-batch whose pass is running; None before the first."""
        return None if self._runner is None else self._runner.shape

    @property
    def samples(self) -> int:
        """Samples of the latest training iteration; one must have run."""
        assert self._log is not None and self._log.latest is not None, "no iteration has been trained"
        return self._log.latest.entry.totals.samples

    @property
    def tokens(self) -> int | None:
        """Tokens of the latest training iteration, where a batch's size is given in tokens."""
        in_tokens = self._run.sampler.tokens_per_iteration is not None
        latest = None if self._log is None else self._log.latest
        return latest.entry.totals.real_tokens if in_tokens and latest is not None else None

    @property
    def has_labels(self) -> bool:
        """Whether the latest training iteration had any; asked where Megatron has waited for its loss."""
        return self._log is None or self._log.has_labels

    def flops(self, count: float) -> float:
        """Floating-point operations of the latest training iteration, from their number over whole samples."""
        return count if self._log is None else self._log.flops(count)

    def stepped(self) -> None:
        """Megatron has stepped its optimizer after the latest training iteration."""
        if self._log is not None:
            self._log.stepped()

    def log_text(self) -> str:
        """The latest training iteration's plan in the form of Megatron's log line; empty before the first."""
        return "" if self._log is None else self._log.text()

    def print_report(self) -> None:
        """At the run's end: gather every rank's records and print the summary, on rank 0."""
        if self._log is not None:
            self._log.print_report("" if self._supply is None else self._supply.planning_load)

    def _start(self) -> None:
        self._clock.ends("model and optimizer")
        run = self._run
        timeout_s = self._run.timeout_s
        self._control = ControlGroup(timeout_s=timeout_s)
        inputs = self._with_model_state(self._resumed())
        files = check_same_run(self._control, run, inputs)
        inputs = msgspec.structs.replace(inputs, files=drawn_by(files))
        if self._control.rank == 0:
            self._records = checkpoint_records(run, inputs)
            for records in self._records:
                self._resources.callback(records.finish)
        if run.reserves_all_memory:
            limit = inputs.planner.memory_limit_bytes
            self._control.run_on_all(lambda: reserve(limit, self._device))
        required = self._required() if self._required else required_fields(self._modules)
        dtype = run.model.state_dtype
        steps = open_runner(
            self._control, inputs.planner, device=self._device, dtype=dtype, timeout_s=timeout_s, adds_up=False
        )
        self._runner = IterationRunner(
            steps,
            inputs.planner,
            required=required,
            make_batch=self._make_batch or batch_maker(self._modules),
            seed=run.sampler.seed,
        )
        self._resources.callback(steps.close)
        replica = parallel_state.get_data_parallel_rank()
        supply = self._supply = self._resources.enter_context(
            PlanSupply(run, self._control, inputs, device=self._device, replica=replica, stage=steps.stage)
        )
        self._longest = _maximum(inputs)
        for split in inputs.splits:
            self._iterators[split.name] = supply.iterator(split, required=required)
        self._log = RunLog(run, inputs, self._control, longest=self._longest, stage=steps.stage, stages=steps.stages)
        self._clock.ends("planner and connections")

    def counting(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """A model provider whose modules' memory the plans leave room for."""

        @functools.wraps(provider)
        def provide(*arguments: Any, **keywords: Any) -> Any:
            self._clock.ends("Megatron's initialisation")
            module = provider(*arguments, **keywords)
            self._modules.append(module)
            return module

        return provide

    def _with_model_state(self, inputs: PlanInputs) -> PlanInputs:
        """The inputs with the model state that was counted on every pipeline rank: the most of any replica's."""
        counted = [parallel_state.get_pipeline_model_parallel_rank(), self._run.state.total(self._modules)]
        most = [0] * inputs.planner.pipeline_parallel
        for stage, size in (values.tolist() for values in self._control.gather(torch.tensor(counted))):
            most[stage] = max(most[stage], size)
        planner = msgspec.structs.replace(inputs.planner, model_state_bytes=tuple(most))
        return msgspec.structs.replace(inputs, planner=planner)


def _maximum(inputs: PlanInputs) -> Shape:
    """The shape that a run without planning would pad every sample to."""
    family = inputs.planner.model.family
    sampler = inputs.splits[0].sampler
    return Shape(
        1, input_positions(family, sampler.max_input_length), target_positions(family, sampler.max_target_length)
    )
