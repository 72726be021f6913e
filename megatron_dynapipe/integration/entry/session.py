"""One run on this rank: plan supply, executor, records; a context manager.

    with Session(run, …) as session, replacements.installed(session):
        pretrain(…, session.datasets, …)

Everything is started when Megatron asks for its datasets: by then the process groups exist and a checkpoint has told
where training resumes. Ranks start things in the same order, and a failure on one is raised on all.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_dynapipe.cost.devices import peak_flops
from megatron_dynapipe.data.collate import RequiredFields
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.entry.about import about
from megatron_dynapipe.integration.entry.resume_record import CheckpointRecords, checkpoint_records
from megatron_dynapipe.integration.entry.start_clock import StartClock
from megatron_dynapipe.integration.execution.iterations import IterationRunner
from megatron_dynapipe.integration.execution.megatron_stage import ForwardStep
from megatron_dynapipe.integration.execution.step_functions import MakeBatch, batch_maker, check_losses, required_fields
from megatron_dynapipe.integration.execution.task_losses import TaskLosses, named_losses
from megatron_dynapipe.integration.execution.transport import open_runner
from megatron_dynapipe.integration.flags.run_config import RunConfig, label_flops
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME
from megatron_dynapipe.integration.hooks.metrics import count_flops, write_metrics, write_task_losses
from megatron_dynapipe.integration.hooks.timers import add_times
from megatron_dynapipe.integration.supply.agreement import AgreedIterator, check_same_run
from megatron_dynapipe.integration.supply.plan_supply import PlanSupply
from megatron_dynapipe.integration.supply.recorder import Recorder
from megatron_dynapipe.planning.costing import planner_of
from megatron_dynapipe.planning.limits import limits
from megatron_dynapipe.report.records import IterationRecord, RunRecord
from megatron_dynapipe.runtime import Trace, platform_of
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.memory import memory_counts, reserve
from megatron_dynapipe.service.planned_splits import check_unchanged, drawn_by, split_sampler
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs
from megatron_dynapipe.units import NS_PER_MS, Shape, input_positions, target_positions

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
        self._run, self.timeout_s = run, run.timeout_s
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
        self._trained: PlannedIteration | None = None
        self._trace: Trace | None = None
        self._labels: torch.Tensor | None = None
        self._peak_flops, self._knows_lengths = 0.0, False
        self._tasks: Sequence[str] = ()
        self._task_losses = TaskLosses((), is_last=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record_checkpoint()
        if self._iterators and (kind is None or issubclass(kind, SystemExit)):
            self._say_start()
            self._recorder.flush()  # Megatron may have left the loop without a report: on notice, or --exit-interval
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
        if self._trained is not None:
            self._say_start()
        item: PlannedIteration = next(iterator)
        self._clock.ends("first plan")
        self._record_checkpoint()
        assert self._runner is not None, "Megatron has asked for its datasets"
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
            return self._evaluated(iterator, losses)
        add_times(get_model_config(models[0]).timers, result.trace, item.waited_seconds)
        self._trained, self._trace, self._labels = item, result.trace, labels
        reports = self._task_losses.add(losses)
        self._recorder.add(item, result.trace, reports)
        if (item.entry.iteration + 1) % self._run.log_interval == 0:
            self._finish_task_losses()
        self._knows_lengths = count_flops(item, self._device)
        self._iterators["train"].prepare()
        return reports

    def stepped(self) -> None:
        """Megatron has stepped its optimizer after the latest training iteration."""
        if self._trained is not None:
            self._recorder.add_step()

    def _finish_task_losses(self) -> None:
        """At the end of an interval of the log: one reduction over replicas, for all tasks."""
        self._task_losses.finish(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._recorder.add_task_losses(self._read_task_losses)

    def _read_task_losses(self) -> dict[str, tuple[float, float]]:
        """The losses of this replica, by the names that evaluations give them, after the whole."""
        by_task = self._task_losses.read(whole=False)
        whole = {LOSS_NAME: (sum(loss for loss, _ in by_task.values()), sum(count for _, count in by_task.values()))}
        return whole | {f"{LOSS_NAME} {task}": sums for task, sums in by_task.items()} if by_task else {}

    def _evaluated(self, iterator: Any, losses: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """The loss reports of an evaluation's iteration, with every task's, for Megatron and the records."""
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        named = named_losses(losses, self._tasks, replicas=replicas)
        self._recorder.add_evaluation(self._split_of(iterator), named)
        return named

    def _split_of(self, iterator: Any) -> str:
        """The split of an iterator that Megatron may have wrapped, to run an item again."""
        inner = getattr(iterator, "iterable", iterator)
        return next(name for name, planned in self._iterators.items() if planned is inner)

    def evaluation(self, data_iterator: Any) -> int:
        """Begin an evaluation on the split of an iterator, or of a list of one for each chunk; its batches."""
        name = self._split_of(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
        self._recorder.begin_evaluation(name)
        return next(split.evaluation or 0 for split in self._run.inputs.splits if split.name == name)

    @property
    def shape(self) -> Shape | None:
        """Shape of the micro-batch whose pass is running; None before the first."""
        return None if self._runner is None else self._runner.shape

    @property
    def samples(self) -> int:
        """Samples of the latest training iteration; one must have run."""
        assert self._trained is not None, "no iteration has been trained"
        return self._trained.entry.totals.samples

    @property
    def tokens(self) -> int | None:
        """Tokens of the latest training iteration, where a batch's size is given in tokens."""
        in_tokens = self._run.sampler.tokens_per_iteration is not None
        return self._trained.entry.totals.real_tokens if in_tokens and self._trained is not None else None

    @property
    def has_labels(self) -> bool:
        """Whether the latest training iteration had any; asked where Megatron has waited for its loss."""
        return self._labels is None or bool(self._labels)

    def flops(self, count: float) -> float:
        """Floating-point operations of the latest training iteration, from their number over whole samples.

        Positions without labels leave out those of the last MLP and the head.
        """
        left_out = 0 if self._trained is None else self._trained.entry.totals.left_out
        executed = count - left_out * label_flops(self._run.planner, self._run.shape)
        if self._peak_flops and self._knows_lengths:
            self._recorder.at_peak_ns = round(executed / self._peak_flops * 1e9)
        return executed

    def log_text(self) -> str:
        """The latest training iteration's plan in the form of Megatron's log line; empty before the first.

        Times are from the first pass of this stage, the last, to its last one; those of the summary and pictures are
        of all stages. Megatron has waited for the loss, so they are known.
        """
        if self._trained is None or self._trace is None:
            return ""
        totals = self._trained.entry.totals
        micro_batches = "+".join(map(str, totals.micro_batches))
        cut = f" samples cut: {totals.cut_samples} |" if totals.cut_samples else ""
        sums = self._task_losses.read(whole=True)
        by_task = {task: total / count for task, (total, count) in sums.items()}
        write_task_losses(by_task, self._trained.entry.iteration + 1)
        tasks = (" %s: %.6E |" * len(by_task)) % (*chain.from_iterable(by_task.items()),)  # half the time of f-strings
        return (
            f" micro-batches: {micro_batches} | padding efficiency: {totals.padding_efficiency:.3f} |"
            f" last stage predicted (ms): {self._predicted()} |"
            f" last stage measured (ms): {self._trace.span_ns() / NS_PER_MS:.1f} |"
            f" plan wait (ms): {self._trained.waited_seconds * 1e3:.1f} |{cut}"
            + (f"\n loss by task |{tasks}" if tasks else "")
        )

    def _predicted(self) -> str:
        """The predicted time of this stage's passes, or that computed costs do not predict this machine."""
        assert self._trained is not None
        if self._is_computed:
            return "not calibrated"
        events = self._trained.entry.stage_plan.predicted
        return f"{(events[-1].end_ns - events[0].start_ns if events else 0) / NS_PER_MS:.1f}"

    def print_report(self) -> None:
        """At the run's end: gather every rank's records and print the summary, on rank 0."""
        summary = self._recorder.report() if self._iterators else None
        if summary is not None:
            print(summary, flush=True)

    def _say_start(self) -> None:
        """Once the first iteration is over: where the time since the launch went, in the log and the records."""
        if (spent := self._clock.finish("first iteration")) is not None:
            self._recorder.add_start(spent)
            if self._control.rank == 0:
                print(f"the start took {spent}", flush=True)

    def _start(self) -> None:
        self._clock.ends("model and optimizer")
        run, timeout_s = self._run, self._run.timeout_s
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
        self._stage, self._stages = steps.stage, steps.stages
        replica = parallel_state.get_data_parallel_rank()
        supply = self._resources.enter_context(
            PlanSupply(run, self._control, inputs, device=self._device, replica=replica, stage=self._stage)
        )
        names = read_meta(run.data).tasks
        self._tasks = names if len(names) > 1 else ()
        self._task_losses = TaskLosses(self._tasks, is_last=self._stage == self._stages - 1)
        self._inputs, self._longest = inputs, _maximum(inputs)
        self._is_computed = isinstance(inputs.costs, AnalyticCosts)
        for split in inputs.splits:
            self._iterators[split.name] = supply.iterator(split, required=required)
        self._first_iteration = inputs.splits[0].first_iteration
        if self._device.type == "cuda" and run.model.dtype.itemsize == 2:  # data sheets say that of half precision
            peak = peak_flops(torch.cuda.get_device_name(self._device)) or 0.0
            self._peak_flops = peak * torch.distributed.get_world_size()
        self._recorder = self._control.run_on_all(self._record)  # rank 0 first moves earlier records
        self._clock.ends("planner and connections")

    def _record(self) -> Recorder:
        run, rank = self._run, self._control.rank
        return Recorder(
            run.report_folder,
            RunRecord(
                world_size=torch.distributed.get_world_size(),
                stages=self._stages,
                memory_limit_bytes=self._inputs.planner.memory_limit_bytes,
                model_state_bytes=self._inputs.planner.model_state_bytes or (),
                maximum=self._longest,
                first_iteration=self._first_iteration,
                computed_costs=self._is_computed,
                samples=read_meta(run.data).samples,
                about=about(run),
            ),
            self._control.collect,
            rank=rank,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            write_metrics=functools.partial(
                write_metrics, platform=platform_of(self._device), interval=run.metrics_interval
            ),
            memory=functools.partial(memory_counts, self._device),
            reserves_all=run.reserves_all_memory,
            of_limits=self._of_limits,
        )

    def _of_limits(self, record: IterationRecord) -> str:
        """How near an iteration of training came to what no plan can beat; of computed costs, how near its plan did."""
        check_unchanged(self._inputs)
        costs, split = self._inputs.costs.load(), self._inputs.splits[0]
        planner, batch = (
            planner_of(self._inputs.planner, costs),
            split_sampler(self._run.data, split).batch(record.iteration),
        )
        bounds = limits(planner, batch, planner.plan(batch, record.iteration))
        measured = () if self._is_computed else (record.measured_ns, record.plan_wait_ns)
        return bounds.causes(record.predicted_ns, *measured)

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
    family, sampler = inputs.planner.family, inputs.splits[0].sampler
    return Shape(
        1, input_positions(family, sampler.max_input_length), target_positions(family, sampler.max_target_length)
    )
