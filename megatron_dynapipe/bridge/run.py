"""One planned recipe on this rank: its iterators, its schedule function, its end.

Everything is started when Bridge's loop first calls the schedule function: by then the model is built, a checkpoint has
told where training goes on, and the recipe is settled. Ranks start things in one order.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model

from megatron_dynapipe.bridge import samples
from megatron_dynapipe.bridge.batches import bridge_batch
from megatron_dynapipe.bridge.layers import choose, compared, kept_config, laid_out, layers_of_checkpoint
from megatron_dynapipe.bridge.recipe import device_of_rank, evaluated_splits, plan_inputs, state_dtype
from megatron_dynapipe.bridge.refusals import of_model
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.units import NS_PER_MS, Shape
from megatron_dynapipe.costing import parse_layer_split
from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.integration.execution.iterations import IterationRunner
from megatron_dynapipe.integration.execution.step_functions import required_fields, takes_mask
from megatron_dynapipe.integration.execution.transport import open_runner
from megatron_dynapipe.integration.flags import machine
from megatron_dynapipe.integration.hooks.timers import add_times
from megatron_dynapipe.integration.supply.agreement import AgreedIterator, check_same_run
from megatron_dynapipe.integration.supply.plan_supply import PlanSupply
from megatron_dynapipe.integration.supply.recorder import Recorder
from megatron_dynapipe.outputs import say
from megatron_dynapipe.report.records import RunRecord
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import LongSamples
from megatron_dynapipe.service.planned_splits import drawn_by
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs
from megatron_dynapipe.store import StoreAddress
from megatron_dynapipe.tools.prepare.learned import is_written

logger = logging.getLogger(__name__)


def _kinds(models: Sequence[torch.nn.Module]) -> str:
    return ", ".join(sorted({type(chunk).__name__ for chunk in unwrap_model(list(models))}))


class Items:
    """A split's iterator for Bridge, which wraps it, and hands each item back to the schedule function."""

    def __init__(self, run: "PlannedRecipe", split: str) -> None:
        self._run = run
        self._split = split

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedIteration:
        return next(self._run.iterator(self._split))


class PlannedRecipe:
    """A run on this rank, inside `planned`; a `SupplyConfig`.

    Args:
        config: the recipe, which still describes its own samples; Bridge settles it when training starts.
        dataset: a dataset folder; None for the recipe's own samples.
        costs: a cost model file; None computes costs.
        chooses_layers: whether layers and virtual stages are chosen before the model is built.
        memory_limit_bytes: that plans may use of a device; None for what the cluster's file or the device says.
        planner_cores: cores of each node that plan, an iteration each.
        long_samples, cluster, store, store_bind, ahead, timeout_s, report_folder: as `planned`.

    Attributes:
        latest: the latest training iteration, with its plan; None before the first.
        inputs: what plans are made from; None before the first iteration.
    """

    loss_on: LossOn | None = None

    def __init__(
        self,
        config: Any,
        *,
        dataset: Path | None,
        costs: Path | None,
        chooses_layers: bool,
        long_samples: LongSamples,
        memory_limit_bytes: int | None,
        cluster: str,
        store: StoreAddress | None,
        store_bind: str,
        planner_cores: int,
        ahead: int,
        timeout_s: float,
        report_folder: Path,
    ) -> None:
        self._config = config
        self._recipe_dataset = config.dataset
        self._inputs_of = partial(
            plan_inputs,
            config,
            costs=costs,
            long_samples=long_samples,
            memory_limit_bytes=memory_limit_bytes,
            cluster=cluster,
        )
        self._data = dataset
        self._chooses_layers = chooses_layers
        self.long_samples = long_samples
        self.store = store
        self.store_bind = store_bind
        self.planners = machine.nodes()
        self.planner_cores: int | None = planner_cores
        self.ahead = ahead
        self.timeout_s = timeout_s
        self.report_folder = report_folder
        self._resources = ExitStack()
        self._iterators: dict[str, AgreedIterator] = {}
        self._runner: IterationRunner | None = None
        self._recorder: Recorder | None = None
        self.latest: PlannedIteration | None = None
        self.inputs: PlanInputs | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.__exit__(*error)

    @property
    def data(self) -> Path:
        """Dataset folder, of the recipe's own samples once Bridge has asked for them."""
        assert self._data is not None, "Bridge has asked for its datasets"
        return self._data

    @property
    def files(self) -> Mapping[str, FileDigests]:
        """Digests of the dataset's files, as its manifest has them."""
        return read_meta(self.data).files

    def close(self) -> None:
        """Report, and end planners and threads, while the process groups still exist; a second call does nothing."""
        recorder = self._recorder
        self._recorder = None
        if recorder is not None and (summary := recorder.report()) is not None:
            say(summary)
        self._resources.close()

    def before_model(self, pg_collection: Any) -> None:
        """Choose layers and virtual stages, now that Bridge has settled the recipe and is about to build its model."""
        config = self._config
        if not self._chooses_layers or of_model(config).pipeline_model_parallel_size == 1:
            return
        if self._data is None:
            self._data = self._exported(samples.context_of(config, pg_collection))
        control = ControlGroup(timeout_s=self.timeout_s)
        inputs = self._inputs_of([], control, data=self._data, iteration=0)
        own = inputs.planner.layout.layers_per_stage
        if file := control.broadcast_text(kept_config(config)):
            split = layers_of_checkpoint(config, file) or own
        else:
            text = control.broadcast_text(control.run_on_all(partial(self._chosen, inputs, control)))
            split = parse_layer_split(text, expected="numbers of layers")
        if split != own:
            self._resources.enter_context(laid_out(config, inputs.planner, split))

    def _chosen(self, inputs: PlanInputs, control: ControlGroup) -> str:
        """On rank 0, the layers of every virtual stage."""
        if control.rank:
            return ""
        split, said = choose(self._config, inputs)
        say(said)
        return ",".join(map(str, split))

    def datasets(self, context: Any) -> tuple[Items | None, Items | None, Items | None]:
        """The iterators of the three splits, for Bridge, which asks for them once its process groups exist.

        Raises:
            DataError: the recipe's samples cannot be read.
        """
        if self._data is None:
            self._data = self._exported(context)
        there = evaluated_splits(self._data)
        valid, test = (Items(self, name) if name in there else None for name in ("valid", "test"))
        return Items(self, "train"), valid, test

    def iterator(self, split: str) -> Iterator[PlannedIteration]:
        """The agreed iterations of a split; the run must have been started."""
        return self._iterators[split]

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
        """Megatron's schedule function: one planned iteration. The shapes it is given are nominal; the plan's count."""
        if collect_non_loss_data:
            raise ConfigError("planned runs compute the loss alone: they cannot collect other outputs of the model")
        models = model if isinstance(model, list) else [model]
        if self._runner is None:
            # The machine has counted the iteration that begins, but no evaluation.
            iteration = get_rerun_state_machine().current_iteration - (not forward_only)
            self._runner = self._start(models, max(iteration, 0))
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        item: PlannedIteration = next(iterator)
        result, losses, _ = self._runner.run(
            item.entry,
            item.micro_batches.__getitem__,
            models,
            forward_step_func,
            longest=Shape(1, self._config.model.seq_length, 0),
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
        )
        if not forward_only:
            self.latest = item
            assert self._recorder is not None, "made with the runner"
            self._recorder.add(item, result.trace, losses)
            add_times(get_model_config(models[0]).timers, result.trace, item.waited_seconds)
            self._log(item, result.trace)
            self._iterators["train"].prepare()
        return losses

    def _start(self, models: Sequence[torch.nn.Module], iteration: int) -> IterationRunner:
        config = self._config
        self._control = control = ControlGroup(timeout_s=self.timeout_s)
        inputs = self._inputs_of(models, control, data=self.data, iteration=iteration)
        inputs = msgspec.structs.replace(inputs, files=drawn_by(check_same_run(control, self, inputs)))
        device = device_of_rank()
        config.dataset.skip_getting_attention_mask_from_dataset = not takes_mask(models)
        required = required_fields(models)
        steps = open_runner(
            control, inputs.planner, device=device, dtype=state_dtype(config), timeout_s=self.timeout_s, adds_up=False
        )
        self._resources.callback(steps.close)
        replica = parallel_state.get_data_parallel_rank()
        supply = self._resources.enter_context(
            PlanSupply(self, control, inputs, device=device, replica=replica, stage=steps.stage)
        )
        for split in inputs.splits:
            self._iterators[split.name] = supply.iterator(split, required=required)
        self.inputs = inputs
        self._recorder = recorder = control.run_on_all(partial(self._make_recorder, inputs, models))
        self._resources.callback(recorder.flush)
        if control.rank == 0:
            say(self._described(inputs, models))
            if text := compared(inputs, config.model.seq_length):
                say(text)
        make_batch = partial(bridge_batch, explicit_mask=takes_mask(models))
        return IterationRunner(steps, inputs.planner, required=required, make_batch=make_batch, seed=config.rng.seed)

    def _make_recorder(self, inputs: PlanInputs, models: Sequence[torch.nn.Module]) -> Recorder:
        planner = inputs.planner
        ranks = (planner.data_parallel, planner.tensor_parallel, planner.pipeline_parallel)
        run = RunRecord(
            world_size=torch.distributed.get_world_size(),
            stages=planner.pipeline_parallel,
            memory_limit_bytes=planner.memory_limit_bytes,
            model_state_bytes=planner.model_state_bytes or (),
            maximum=Shape(1, self._config.model.seq_length, 0),
            first_iteration=inputs.splits[0].first_iteration,
            computed_costs=isinstance(inputs.costs, AnalyticCosts),
            samples=read_meta(self.data).samples,
            about={
                "model": f"{_kinds(models)} of Megatron-Bridge, {planner.layout.model.layers} layers",
                "data": str(self.data),
                "layout": f"{' × '.join(map(str, ranks))} (data × tensor × pipeline), {planner.chunks} chunks a rank",
            },
        )
        return Recorder(
            self.report_folder,
            run,
            self._control.collect,
            rank=self._control.rank,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            write_metrics=lambda _item, _events: None,  # Bridge has writers of its own, and logs memory
        )

    def _described(self, inputs: PlanInputs, models: Sequence[torch.nn.Module]) -> str:
        """What is planned, in one line."""
        planner = inputs.planner
        also = [
            *(["pieces of samples"] if planner.may_cut else []),
            *(["divided backward passes"] if planner.effective_split_backward != "off" else []),
            *(["heads on labels alone"] if inputs.splits[0].sampler.labels else []),
        ]
        return (
            f"planned iterations of {_kinds(models)}: {', '.join(planner.micro_batch_layouts)} micro-batches,"
            f" recomputation {', '.join(planner.recompute)}{''.join(f', {what}' for what in also)}"
        )

    def _log(self, item: PlannedIteration, trace: Trace) -> None:
        """A line before Bridge's, of its interval, on rank 0."""
        number = item.entry.iteration + 1
        if self._control.rank == 0 and number % self._config.logger.log_interval == 0:
            totals = item.entry.totals
            events = item.entry.stage_plan.predicted
            predicted = (events[-1].end_ns - events[0].start_ns) / NS_PER_MS if events else 0.0
            say(
                f"iteration {number} planned: micro-batches {'+'.join(map(str, totals.micro_batches))} |"
                f" padding efficiency {totals.padding_efficiency:.3f} | first stage predicted {predicted:.1f} ms,"
                f" measured {trace.span_ns() / NS_PER_MS:.1f} ms | plan wait {item.waited_seconds * 1e3:.1f} ms"
            )

    def _exported(self, context: Any) -> Path:
        """The recipe's own samples as a dataset folder, which rank 0 writes where there is none yet."""
        from megatron.bridge.data.utils import get_dataset_provider

        counts = [context.train_samples, context.valid_samples, context.test_samples]
        name = samples.digest(self._recipe_dataset, self._config.tokenizer, counts)
        folder = self.report_folder.absolute() / f"samples-{name}"
        datasets = get_dataset_provider(self._recipe_dataset)(
            counts, self._recipe_dataset, tokenizer=context.tokenizer, pg_collection=context.pg_collection
        )
        control = ControlGroup(timeout_s=self._config.dist.distributed_timeout_minutes * 60.0)

        def write() -> None:
            if torch.distributed.get_rank() == 0 and not is_written(folder):
                say(f"reading the recipe's samples once, into {folder}")
                samples.write(folder, datasets, context.tokenizer)

        control.run_on_all(write)
        if not is_written(folder):
            raise DataError(
                f"expected the recipe's samples in {folder}, where rank 0 has written them, found none",
                hint="give planned() a report_folder that all nodes share",
            )
        return folder
