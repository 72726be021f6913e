"""A recipe of Megatron-Bridge as the host of a planned run.

Everything is started when Bridge's loop first calls the schedule function: by then the model is built, a checkpoint has
told where training goes on, and the recipe is settled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.costing import parse_layer_split
from megatron_dynapipe.data.learned import is_written
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.bridge import samples
from megatron_dynapipe.megatron.bridge.batches import bridge_batch
from megatron_dynapipe.megatron.bridge.layers import before_weights, choose, kept_config, laid_out, layers_of_checkpoint
from megatron_dynapipe.megatron.bridge.recipe import device_of_rank, evaluated_splits, plan_inputs
from megatron_dynapipe.megatron.bridge.refusals import of_model
from megatron_dynapipe.megatron.equip.attention import mark_sinks
from megatron_dynapipe.megatron.execution.step_functions import MakeBatch, takes_mask
from megatron_dynapipe.megatron.flags.run_config import Sources
from megatron_dynapipe.megatron.models.config import state_dtype
from megatron_dynapipe.megatron.run.host import Host
from megatron_dynapipe.megatron.run.run import Items, Run
from megatron_dynapipe.megatron.supply.long_samples import long_samples
from megatron_dynapipe.outputs import say
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import LongSamples
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import PlanInputs

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


def _kinds(models: Sequence[torch.nn.Module]) -> str:
    return ", ".join(sorted({type(chunk).__name__ for chunk in unwrap_model(list(models))}))


class Recipe(Host):
    """Bridge's loop with a recipe, on this rank.

    Args:
        config: the recipe, which still describes its own samples; Bridge settles it when training starts.
        dataset: a dataset folder; None for the recipe's own samples.
        costs: a cost model file; None computes costs.
        chooses_layers: whether layers and virtual stages are chosen before the model is built.
        memory_limit_bytes: that plans may use of a device; None for what the cluster's file or the device says.
        context_teams, long_samples, cluster, correct, and of `sources` store, store_bind, planner_cores, ahead,
            timeout_s, report_folder: as `planned`.
    """

    def __init__(
        self,
        config: "ConfigContainer",
        *,
        dataset: Path | None,
        costs: Path | None,
        chooses_layers: bool,
        context_teams: int,
        long_samples: LongSamples,
        memory_limit_bytes: int | None,
        cluster: str,
        correct: bool,
        **sources: Any,
    ) -> None:
        self._config = config
        self._recipe_dataset = config.dataset
        self._inputs_of = partial(
            plan_inputs,
            config,
            costs=costs,
            context_teams=context_teams,
            long_samples=long_samples,
            memory_limit_bytes=memory_limit_bytes,
            cluster=cluster,
        )
        self._data = dataset
        self._chooses_layers = chooses_layers
        self.sources = Sources(**sources)
        self.long_samples = long_samples
        self.corrects = correct

    @property
    def data(self) -> Path:
        """Dataset folder, of the recipe's own samples once Bridge has asked for them."""
        assert self._data is not None, "Bridge has asked for its datasets"
        return self._data

    def read_samples(self, context: object) -> None:
        """See that there is a dataset folder, once Bridge's process groups exist.

        Raises:
            DataError: the recipe's samples cannot be read.
        """
        if self._data is None:
            self._data = self._exported(context)

    @contextmanager
    def layout(self, pg_collection: Any) -> Iterator[None]:
        """A block in which Bridge builds the model in the layers and virtual stages that are predicted fastest.

        Called when Bridge has settled the recipe and is about to build its model.
        """
        with before_weights(self._config.model, mark_sinks), self._laid_out(pg_collection):
            yield

    def _laid_out(self, pg_collection: object) -> AbstractContextManager[None]:
        config = self._config
        if not self._chooses_layers or of_model(config).pipeline_model_parallel_size == 1:
            return nullcontext()
        self.read_samples(samples.context_of(config, pg_collection))
        control = ControlGroup(timeout_s=self.sources.timeout_s)
        inputs = self._inputs_of([], control, data=self.data, iteration=0)
        own = inputs.planner.layout.layers_per_stage
        if file := control.broadcast_text(kept_config(config)):
            split = layers_of_checkpoint(config, file) or own
        else:
            text = control.broadcast_text(control.run_on_all(partial(self._chosen, inputs, control)))
            split = parse_layer_split(text, expected="numbers of layers")
        return nullcontext() if split == own else laid_out(config, inputs.planner, split)

    def _chosen(self, inputs: PlanInputs, control: ControlGroup) -> str:
        """On rank 0, the layers of every virtual stage."""
        if control.rank:
            return ""
        split, said = choose(self._config, inputs)
        say(said)
        return ",".join(map(str, split))

    def inputs(self, control: ControlGroup, models: Sequence[nn.Module], *, evaluates: bool) -> PlanInputs:
        """Made from the recipe as Bridge has settled it, and the model that it has built."""
        config = self._config
        self.device = device_of_rank()
        self.dtype = state_dtype(of_model(config))
        self.weights_dtype = of_model(config).params_dtype
        self.seed = config.rng.seed
        self.log_interval = config.logger.log_interval
        self.files = read_meta(self.data).files
        # Bridge's machine has counted the iteration that begins, but no evaluation.
        iteration = max(get_rerun_state_machine().current_iteration - (not evaluates), 0)
        return self._inputs_of(models, control, data=self.data, iteration=iteration)

    def opened(self, control: ControlGroup, inputs: PlanInputs) -> None:
        """Bridge's dataset is told what the model takes, which the first rank says."""
        self._is_first = control.rank == 0

    def make_batch(self, models: Sequence[nn.Module]) -> MakeBatch:
        """What Bridge's step functions take."""
        self._config.dataset.skip_getting_attention_mask_from_dataset = not takes_mask(models)
        return partial(bridge_batch, explicit_mask=takes_mask(models))

    def about(self, inputs: PlanInputs, models: Sequence[nn.Module]) -> Mapping[str, str]:
        """What the recipe's model says."""
        planner = inputs.planner
        if self._is_first:
            say(self._described(inputs, models))
            for split in inputs.splits:
                for line in long_samples(split_sampler(self.data, split), self.data, split):
                    say(f"{split.name}: {line}")
        ranks = (planner.data_parallel, planner.tensor_parallel, planner.pipeline_parallel)
        return {
            "model": f"{_kinds(models)} of Megatron-Bridge, {planner.layout.model.layers} layers",
            "data": str(self.data),
            "layout": f"{' × '.join(map(str, ranks))} (data × tensor × pipeline), {planner.chunks} chunks a rank",
        }

    def trained(self, number: int, plan: Callable[[], str]) -> None:
        """A line before Bridge's, of its interval, on rank 0."""
        if self._is_first and number % self.log_interval == 0:
            say(f"iteration {number} planned:{plan()}")

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

    def _exported(self, context: Any) -> Path:
        """The recipe's own samples as a dataset folder, which rank 0 writes where there is none yet."""
        from megatron.bridge.data.utils import get_dataset_provider

        counts = [context.train_samples, context.valid_samples, context.test_samples]
        name = samples.digest(self._recipe_dataset, self._config.tokenizer, counts)
        folder = self.sources.report_folder.absolute() / f"samples-{name}"
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


class PlannedRecipe(Run):
    """The run of a recipe, inside `planned`."""

    host: Recipe
    _is_closed = False

    def before_model(self, pg_collection: object) -> None:
        """Lay the model out that Bridge builds next, until the run is closed."""
        self._resources.enter_context(self.host.layout(pg_collection))

    def datasets(self, context: object) -> tuple[Items, Items | None, Items | None]:
        """The iterators of the three splits, for Bridge, which asks for them once its process groups exist.

        Raises:
            DataError: the recipe's samples cannot be read.
        """
        self.host.read_samples(context)
        return self.items(evaluated_splits(self.host.data))

    def close(self) -> None:
        """Report, and end planners and threads, while the process groups still exist; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.print_report()
            self.__exit__(None, None, None)
