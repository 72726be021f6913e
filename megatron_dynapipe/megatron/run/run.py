"""One planned run on this rank: its start, its schedule function, its end; a context manager.

    with Run(host) as run:
        …                          # the host's loop calls run.forward_backward as Megatron's schedule function

Ranks start things in the same order, and a failure on one is raised on all. A run starts when its host hands it the
model, or at the first call of the schedule function: by then the process groups exist, and a checkpoint has told where
training goes on. What the run says of itself is in `log`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import Shape, input_positions, target_positions
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.execution.iterations import IterationRunner
from megatron_dynapipe.megatron.execution.transport import open_runner, team_groups
from megatron_dynapipe.megatron.hooks.timers import add_times
from megatron_dynapipe.megatron.models import eight_bits
from megatron_dynapipe.megatron.run.host import Host
from megatron_dynapipe.megatron.run.log import RunLog
from megatron_dynapipe.megatron.run.start_clock import StartClock
from megatron_dynapipe.megatron.supply.agreement import AgreedIterator, check_same_run
from megatron_dynapipe.megatron.supply.corrector import Corrector, described
from megatron_dynapipe.megatron.supply.plan_supply import PlanSupply
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.planned_splits import drawn_by
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs


class Items:
    """A split's iterator for a loop, which may wrap it, and hands each item back to the schedule function."""

    def __init__(self, run: "Run", split: str) -> None:
        self._run = run
        self.split = split

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedIteration:
        return next(self._run.iterators[self.split])


class Run:
    """A planned run on this rank.

    Args:
        host: the program that trains.
        clock: times this start; by default it begins with this process.

    Attributes:
        timeout_s: the deadline of every wait in an iteration.
        inputs: what plans are made from; None before the start.
        iterators: the splits' iterators by name; empty before the start.
        log: what the run says; None before the start.
    """

    inputs: PlanInputs | None = None
    log: RunLog | None = None

    def __init__(self, host: Host, *, clock: StartClock | None = None) -> None:
        self.host = host
        self.timeout_s = host.sources.timeout_s
        self.clock = clock or StartClock()
        self.iterators: dict[str, AgreedIterator] = {}
        self._resources = ExitStack()
        self._runner: IterationRunner | None = None
        self._supply: PlanSupply | None = None
        self._corrector: Corrector | None = None
        self._evaluated = Counter[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.log is not None and (kind is None or issubclass(kind, SystemExit)):
            self.log.add_start(self.clock.finish("first iteration"))
            self.log.flush()  # the loop may have ended without a report: on notice, or early
        self._resources.__exit__(kind, error, trace)

    @property
    def latest(self) -> PlannedIteration | None:
        """The latest training iteration, with its plan; None before the first."""
        return None if self.log is None else self.log.latest

    @property
    def shape(self) -> Shape | None:
        """Shape of the micro-batch whose pass is running; None before the first."""
        return None if self._runner is None else self._runner.shape

    def start(self, models: Sequence[torch.nn.Module], *, evaluates: bool = False) -> IterationRunner:
        """Make groups, planners and iterators, once, for this rank's model chunks; every rank calls it.

        `evaluates`: the run begins with an evaluation.
        """
        if self._runner is not None:
            return self._runner
        host = self.host
        if models:  # a patched checkout has not handed them over yet
            eight_bits.tell(get_model_config(models[0]))
        control = ControlGroup(timeout_s=self.timeout_s)
        inputs = host.inputs(control, models, evaluates=evaluates)
        files = check_same_run(control, host.files, inputs)
        self.inputs = inputs = msgspec.structs.replace(inputs, files=drawn_by(files))
        host.opened(control, inputs)
        required = host.required(models)
        steps = open_runner(
            control, inputs.planner, device=host.device, dtype=host.dtype, timeout_s=self.timeout_s, adds_up=False
        )
        self._resources.callback(steps.close)
        if inputs.planner.context_teams > 1:
            equip(models).channel.teams = team_groups(
                control, inputs.planner, device=host.device, timeout_s=self.timeout_s
            )
        replica = parallel_state.get_data_parallel_rank()
        supply = self._supply = self._resources.enter_context(
            PlanSupply(host.sources, control, inputs, device=host.device, replica=replica, stage=steps.stage)
        )
        self.iterators = {split.name: supply.iterator(split, required=required) for split in inputs.splits}
        self._longest = longest_shape(inputs)
        # On rank 0 first, which moves earlier records.
        self._corrector = self._make_corrector(control, inputs, supply, steps.stage) if host.corrects else None
        make_log = partial(RunLog, host, inputs, control, about=host.about(inputs, models), longest=self._longest)
        make_log = partial(make_log, measured=None if self._corrector is None else self._corrector.add)
        self.log = control.run_on_all(partial(make_log, stage=steps.stage, stages=steps.stages))
        if percents := inputs.planner.corrections:
            found = Correction(number=0, first_iteration=inputs.splits[0].first_iteration, percents=percents)
            self.log.add_correction(found)
            self.log.say_on_first(described(found))
        make_batch = host.make_batch(models)
        self._runner = IterationRunner(steps, inputs.planner, required=required, make_batch=make_batch, seed=host.seed)
        self.clock.ends("planner and connections")
        return self._runner

    def items(self, splits: Collection[str]) -> tuple[Items, Items | None, Items | None]:
        """The iterators of train, validation and test, of the splits that there are; others are None."""
        valid, test = (Items(self, name) if name in splits else None for name in ("valid", "test"))
        return Items(self, "train"), valid, test

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **_shapes: object,
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's schedule function: one planned iteration. The shapes it passes are nominal; the plan's count."""
        if collect_non_loss_data:
            raise ConfigError("planned runs compute the loss alone: they cannot collect other outputs of the model")
        models = model if isinstance(model, list) else [model]
        runner = self.start(models, evaluates=forward_only)
        log = self.log
        assert log is not None, "made at the start"
        if log.latest is not None:
            log.add_start(self.clock.finish("first iteration"))
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        item: PlannedIteration = next(iterator)
        self.clock.ends("first plan")
        self.host.begin_iteration()
        result, losses, labels = runner.run(
            item.entry,
            item.micro_batches.__getitem__,
            models,
            self.host.wrapped(forward_step_func),
            longest=self._longest,
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
            on_first_pass=lambda: self.clock.ends("kernels and warm-up"),
        )
        self.host.check(losses)
        if forward_only:
            return self._evaluate(split_of(iterator), losses)
        self._evaluated.clear()
        add_times(get_model_config(models[0]).timers, result.trace, item.waited_seconds)
        reports = log.add(item, result.trace, losses, labels)
        if self._corrector is not None and (said := self._corrector.step(item.entry.iteration)):
            log.say_on_first(said)
        self.iterators["train"].prepare()
        self.host.trained(item.entry.iteration + 1, log.text)
        return reports

    def _make_corrector(self, control: ControlGroup, inputs: PlanInputs, supply: PlanSupply, stage: int) -> Corrector:
        return Corrector(
            control,
            inputs.planner,
            stage=stage,
            ahead=supply.planned_ahead,
            first_iteration=inputs.splits[0].first_iteration,
            is_computed=isinstance(inputs.costs, AnalyticCosts),
            adopt=self._adopt,
        )

    def _adopt(self, correction: Correction) -> bool:
        """Have planners, and this node where it makes late plans, know corrected costs; every rank calls it."""
        assert self._supply is not None and self.log is not None, "started"
        is_known = self._supply.correct(correction)
        if is_known:
            self.log.add_correction(correction)
            self.host.corrected(correction)
        return is_known

    def _evaluate(self, split: str, losses: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Take in a batch of an evaluation, which begins with the first of as many as are planned."""
        assert self.log is not None, "started"
        if self._evaluated[split] % self._batches(split) == 0:
            self.log.begin_evaluation(split)
        self._evaluated[split] += 1
        return self.log.add_evaluation(split, losses)

    def evaluation(self, data_iterator: object) -> int:
        """Batches of an evaluation on the split of an iterator."""
        return self._batches(split_of(data_iterator))

    def _batches(self, split: str) -> int:
        assert self.inputs is not None, "started"
        return next(each.evaluation or 1 for each in self.inputs.splits if each.name == split)

    def print_report(self) -> None:
        """At the run's end: gather every rank's records and print the summary, on rank 0."""
        if self.log is not None:
            self.log.print_report("" if self._supply is None else self._supply.said_at_the_end())


def split_of(data_iterator: Any) -> str:
    """The split of `Items`, which a loop may have wrapped to run one again, or put in a list of one for each chunk."""
    iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    items: Items = iterator if isinstance(iterator, Items) else iterator.iterable
    return items.split


def longest_shape(inputs: PlanInputs) -> Shape:
    """The shape that a run without planning would pad every sample to."""
    family = inputs.planner.model.family
    sampler = inputs.splits[0].sampler
    return Shape(
        1, input_positions(family, sampler.max_input_length), target_positions(family, sampler.max_target_length)
    )
