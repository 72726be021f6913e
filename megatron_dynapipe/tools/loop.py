"""Planned passes in a training loop of your own, as reinforcement-learning trainers have one.

    with planned(models, "costs.json", memory_mb=60_000) as plans:
        micro_batches = plans.micro_batches(lengths)  # of this replica's samples: [[4], [0, 2], [1, 3]]
        reports = plans.forward_backward(  # in place of Megatron's schedule function
            forward_step_func=step, data_iterator=batches, model=models, num_microbatches=len(micro_batches)
        )

The loop keeps its step function, its batches and its results: the iterator gives one micro-batch after the other, in
the order in which `micro_batches` names them, and reports come back in this order. Each replica plans its own samples
in the step, on each of its ranks: a plan is a pure function of lengths, so they come to the same one.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError, DataError, PlanError
from megatron_dynapipe.core.executor import Trace
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.step import StepRunner
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.costing import CostModel, TableCostModel
from megatron_dynapipe.megatron.execution.forward_backward import run_passes
from megatron_dynapipe.megatron.execution.megatron_stage import ForwardStep, MegatronStage
from megatron_dynapipe.megatron.execution.micro_batch_context import MicroBatchContext
from megatron_dynapipe.megatron.execution.transport import open_runner
from megatron_dynapipe.megatron.models.config import state_dtype
from megatron_dynapipe.runtime.control_group import ControlGroup, StepAgreement
from megatron_dynapipe.runtime.process_groups import groups_made
from megatron_dynapipe.store.entry import StageEntry
from megatron_dynapipe.tools.loop_planning import WireRows, plain_rows, stage_entry
from megatron_dynapipe.tools.loop_settings import check_models, settings_of

_NOMINAL = {"seq_length", "micro_batch_size", "decoder_seq_length", "first_val_step"}
"""Arguments of Megatron's schedule functions in whose place a plan has its own."""
_KINDS = {True: "forward passes alone", False: "training"}


@contextmanager
def planned(
    models: Sequence[torch.nn.Module],
    costs: CostModel | str | Path,
    *,
    memory_mb: float,
    layout: BatchLayout | str = BatchLayout.PACKED,
    wire_rows: WireRows | None = None,
    equal_counts: bool = False,
    seed: int = 0,
    timeout_s: float = 300.0,
    **settings: object,
) -> Iterator["Plans"]:
    """Plan the passes of a training loop for the length of a block. Every rank of the job enters it, at one point.

    Args:
        models: this rank's chunks of a GPT, with Megatron's `DistributedDataParallel` if they train.
        costs: this model's: a cost model, as `costing.AnalyticCostModel`, or the path of a file.
        memory_mb: memory of one device (1e6 bytes) that these models may use, with weights, gradients and optimizer.
        layout: how the step function puts samples into a micro-batch: "packed" one after another in a row, or "padded".
        wire_rows: how many rows it makes of them, where it pads them, or ranks share a sequence.
        equal_counts: every replica runs as many micro-batches in one order of passes, planned from all replicas'
            lengths; needed where replicas meet in passes, and always so where they share experts.
        seed: draws dropouts.
        timeout_s: deadline of every wait.
        settings: further fields of `PlannerSettings`; `recompute` is the mode that the models were built with.

    Raises:
        ConfigError: the models have something that planned passes would get wrong, or settings do not go together.
        CostModelError: costs that cannot be read, or are another model's.
    """
    config = get_model_config(models[0])
    if config.context_parallel_size > 1 and wire_rows is None:
        raise ConfigError("expected wire_rows where ranks share a sequence: context_parallel_size is above 1")
    control = ControlGroup(timeout_s=timeout_s)
    model = control.run_on_all(partial(_costs_of, models, costs))
    chosen = settings_of(models, control, model, memory_mb=memory_mb, layout=BatchLayout(layout), given=settings)
    control.close()
    plans = Plans(
        models,
        planner_of(chosen, model),
        wire_rows=wire_rows or plain_rows(chosen),
        equal_counts=equal_counts or config.expert_model_parallel_size > 1,
        seed=seed,
        timeout_s=timeout_s,
    )
    plans.wake()
    yield plans
    plans.sleep()  # after an error the groups may be in use


def _costs_of(models: Sequence[torch.nn.Module], costs: CostModel | str | Path) -> CostModel:
    """The costs of models that can be planned; raises as `planned`."""
    model = TableCostModel.load(Path(costs)) if isinstance(costs, str | Path) else costs
    check_models(models)
    return model


class Plans:
    """One rank's part in the planned passes of a loop; `planned` makes it, with arguments of the same meaning.

    Attributes:
        trace: when the instructions of the latest list ran; None before the first.
    """

    trace: Trace | None = None

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        planner: Planner,
        *,
        wire_rows: WireRows,
        equal_counts: bool,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._models = list(models)
        self._planner = planner
        self._wire_rows = wire_rows
        self._equal_counts = equal_counts
        self._timeout_s = timeout_s
        self._context = MicroBatchContext(models, seed=seed)
        self._planned: deque[StageEntry] = deque()
        self._iteration = 0
        self._control: ControlGroup | None = None
        self._replicas: list[list[int]] = []  # ranks of each
        self._groups: list[dist.ProcessGroup] = []
        self._runners: dict[bool, StepRunner] = {}  # by whether messages go through the host
        self._ran = set[bool]()  # of forward passes alone, and of training

    def wake(self) -> None:
        """Make process groups and pools of messages, at the start and after `sleep`; every rank calls it."""
        if self._control is not None:
            return
        device, config = next(self._models[0].parameters()).device, get_model_config(self._models[0])
        with groups_made() as self._groups:
            self._control = control = ControlGroup(timeout_s=self._timeout_s)
            replicas = control.gather(torch.tensor(parallel_state.get_data_parallel_rank()))
            named = [int(replica) for replica in replicas]
            self._replicas = [[rank for rank, of in enumerate(named) if of == each] for each in sorted(set(named))]
            for through_host in (True, False):
                self._runners[through_host] = open_runner(
                    control,
                    self._planner.settings,
                    device=device,
                    dtype=state_dtype(config),
                    timeout_s=self._timeout_s,
                    adds_up=False,
                    through_host=through_host,
                )

    def sleep(self) -> None:
        """Give back pools and process groups, before the device's memory goes to somebody else; every rank calls it.

        Plans that have not run are dropped. Weights stay where the loop puts them.
        """
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._ran.clear()  # communicators are made anew, for which devices have to be idle again
        self._planned.clear()
        self._control = None
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def micro_batches(self, lengths: Iterable[int], *, forward_only: bool = False) -> list[list[int]]:
        """Plan a later call of `forward_backward`; every rank calls it, with the samples of its replica.

        Args:
            lengths: positions of each sample.
            forward_only: without backward passes.

        Returns:
            Places in `lengths`: of every micro-batch, in the order of its forward passes.

        Raises:
            ConfigError: what is given are no lengths, or the plans are asleep.
            PlanningError: a replica has no sample, or with equal counts another number than others.
            InfeasibleError: a sample does not fit; the message names it, the stage and the memory.
            PlanError: ranks of one replica have different plans.
        """
        control = self._awake()
        error: Exception | None = None
        own: list[int] = []
        entry: StageEntry | None = None
        try:
            own = [operator.index(length) for length in lengths]
        except TypeError as raised:
            error = ConfigError(f"expected the lengths of samples, in positions: {raised}")
        others = self._all_lengths(control, own) if self._equal_counts else []
        try:
            entry = None if error else self._plan(own, others, forward_only=forward_only)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        identity = b"" if entry is None else bytes.fromhex(entry.plan_digest)
        StepAgreement(control, error, identity=identity, differ=_differ, alike=self._replicas).settle()
        assert entry is not None, "without one the agreement raises"
        self._planned.append(entry)
        self._iteration += not forward_only
        return [list(micro_batch.sample_ids) for micro_batch in entry.micro_batches]

    def _all_lengths(self, control: ControlGroup, own: Sequence[int]) -> list[list[int]]:
        """Of every rank."""
        texts = control.gather_texts(msgspec.json.encode(own).decode())
        return [msgspec.json.decode(text, type=list[int]) for text in texts]

    def _plan(self, own: Sequence[int], others: Sequence[Sequence[int]], *, forward_only: bool) -> StageEntry:
        return stage_entry(
            self._planner,
            own,
            others,
            iteration=self._iteration,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            forward_only=forward_only,
            wire_rows=self._wire_rows,
        )

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **nominal: object,
    ) -> list[Any]:
        """Run what `micro_batches` has planned, as Megatron's schedule functions do; plans run in their order.

        Args:
            forward_step_func: Megatron's kind of step function, called once for each micro-batch and chunk.
            data_iterator: whatever the step function takes; with virtual stages a list, one for each chunk.
            model: the models that plans are made for.
            num_microbatches: as many as planned; losses that are not per token are divided by it.
            forward_only: as planned.
            collect_non_loss_data: as Megatron's.
            force_all_reduce: as Megatron's.
            nominal: lengths and sizes, in whose place a plan has its own.

        Returns:
            On the last stage, what the loss function reports of each micro-batch, in order; elsewhere nothing.

        Raises:
            ConfigError: there is no such plan, or an argument that plans would get wrong.
            DataError: the iterator ends early.
            ExecutionError: the step function makes other rows than `wire_rows` says.
        """
        self._awake()
        _check_nominal(nominal)
        step = self._step(forward_step_func, data_iterator, model)
        entry = self._next(num_microbatches, forward_only)
        # The first list of each kind loads kernels, for which a device may have to be idle: messages wait on the host.
        runner = self._runners[forward_only not in self._ran]
        make_stage = partial(
            MegatronStage,
            self._models,
            step,
            lambda _: {},
            entry.stage_plan.instructions,
            is_last=runner.stage == runner.stages - 1,
            equips=False,
            collect_non_loss_data=collect_non_loss_data,
            prepare=partial(self._prepare, entry, runner),
        )
        how = {"forward_only": forward_only, "force_all_reduce": force_all_reduce}
        totals, stage = run_passes(runner, entry.stage_plan, self._models, make_stage, **how)
        self._ran.add(forward_only)
        self.trace = totals.trace
        return stage.reports()

    def _awake(self) -> ControlGroup:
        if self._control is None:
            raise ConfigError("expected plans that are awake, got sleeping ones", hint="call wake on every rank")
        return self._control

    def _next(self, count: int, forward_only: bool) -> StageEntry:
        """The next plan, which is taken if it is what the loop asks for."""
        if not self._planned:
            raise ConfigError("expected a plan of this step, got none", hint="call micro_batches before each step")
        entry = self._planned[0]
        planned = len(entry.micro_batches)
        if (count, forward_only) != (planned, entry.forward_only):
            raise ConfigError(
                f"expected num_microbatches of the plan, {planned} of {_KINDS[entry.forward_only]}, got {count} of"
                f" {_KINDS[forward_only]}",
                hint="losses are divided by it; plans run in the order in which micro_batches made them",
            )
        return self._planned.popleft()

    def _step(self, step: Callable[..., Any], data_iterator: Any, model: Any) -> ForwardStep:
        """The loop's step function, over its own iterators."""
        models = model if isinstance(model, list | tuple) else [model]
        iterators = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
        if len(models) != len(self._models) or any(map(operator.is_not, models, self._models)):
            raise ConfigError("expected the models that plans are made for, got others", hint="plan those, too")
        if len(iterators) != len(models):
            raise ConfigError(f"expected an iterator for each of {len(models)} chunks, got {len(iterators)}")
        of_chunk = {id(chunk): iterator for chunk, iterator in zip(models, iterators, strict=True)}

        def run(_: Any, chunk: torch.nn.Module) -> Any:
            try:
                return step(of_chunk[id(chunk)], chunk)
            except StopIteration as end:
                raise DataError("expected as many micro-batches as planned, got an iterator that ends early") from end

        return run

    def _prepare(self, entry: StageEntry, runner: StepRunner, instruction: Pass) -> None:
        """Set the models for a pass."""
        stage = instruction.chunk * runner.stages + runner.stage
        mode = entry.micro_batches[instruction.micro_batch].recompute[stage]
        self._context.begin(entry.iteration, instruction.micro_batch, mode)


def _check_nominal(arguments: Mapping[str, Any]) -> None:
    if unknown := sorted(name for name, value in arguments.items() if value is not None and name not in _NOMINAL):
        raise ConfigError(f"planned passes do not know these arguments of a schedule: {', '.join(unknown)}")


def _differ(group: Sequence[int], other: int, _: Sequence[bytes]) -> PlanError:
    return PlanError(
        f"expected one plan on all ranks of a replica, got different ones on ranks {group[0]} and {other}",
        hint="give each of them the same lengths in the same order",
    )
