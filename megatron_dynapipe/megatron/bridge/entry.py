"""`planned`: for the length of a block, Bridge's training loop runs planned iterations of a recipe."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.megatron.bridge import recipe, relied_on
from megatron_dynapipe.megatron.bridge.hints import in_python
from megatron_dynapipe.megatron.bridge.layers import AUTO, changed, chooses
from megatron_dynapipe.megatron.bridge.refusals import check_recipe, checked_dataset, of_model
from megatron_dynapipe.megatron.bridge.run import PlannedRecipe, Recipe
from megatron_dynapipe.megatron.hooks import repairs
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.report import REPORT_FOLDER
from megatron_dynapipe.runtime.start_store import may_start_again, renew
from megatron_dynapipe.sampling import LongSamples
from megatron_dynapipe.store import find_address

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

Iterators = tuple[Any | None, Any | None, Any | None]
_originals = Originals()


class PlannedDataset(DatasetProvider):
    """A run's samples, as the recipe names them to Bridge while the run lasts.

    Attributes:
        skip_getting_attention_mask_from_dataset: whether attention is causal by itself; set when the model is known.
    """

    skip_getting_attention_mask_from_dataset = True

    def __init__(self, datasets: Callable[[DatasetBuildContext], Iterators]) -> None:
        super().__init__(dataloader_type="external")
        self._datasets = datasets

    def build_datasets(self, context: DatasetBuildContext) -> Iterators:
        """The iterators of train, validation and test."""
        return self._datasets(context)


@contextlib.contextmanager
def planned(
    config: "ConfigContainer",
    dataset: str | Path | None = None,
    costs: str | Path = AUTO,
    *,
    layers: str = AUTO,
    context_teams: int = 1,
    calibrate_s: float = 0.0,
    long_samples: LongSamples | str = LongSamples.FAIL,
    memory_limit_mb: float | None = None,
    cluster: str = AUTO,
    store_url_file: str | Path | None = None,
    store_bind: str = "127.0.0.1",
    planner_cores: int | None = None,
    ahead: int | None = None,
    correct: bool = True,
    timeout_s: float = 300.0,
    report_folder: str | Path = REPORT_FOLDER,
) -> Iterator[PlannedRecipe]:
    """Have Bridge's `pretrain` and `finetune` run planned iterations of a recipe for the length of a block.

    Args:
        config: a `ConfigContainer` of a GPT or Hybrid model; after the block it is as it was.
        dataset: a folder that `megatron-dynapipe data prepare` has made; None for the recipe's own samples.
        costs: a cost model file; "auto" computes costs from the model's numbers and the device's rates.
        context_teams: up to so many replicas, 2, 4, 8 …, run long samples together; 1 for none.
        layers: "auto" chooses layers per stage and virtual stages, by plans; "recipe" keeps the recipe's.
        calibrate_s: seconds for which costs are measured instead, before the recipe's first run on such a machine.
        long_samples: what becomes of samples longer than the recipe's sequence length: "fail", "skip" or "truncate".
        memory_limit_mb: memory of one device that plans may use; by default what the cluster's file or the device says.
        cluster: a file of memory and links; "auto" finds one by the device's name, "none" uses none.
        store_url_file: holds the URL of an existing plan store; by default the run starts one.
        store_bind: address at which its own store listens, for runs on several nodes.
        planner_cores: most cores of each node that plan, an iteration each; by default those that ranks leave.
        ahead: iterations planned ahead of training; by default as many as the first plan's time asks for.
        correct: whether plans follow how long passes take on the run's devices.
        timeout_s: deadline of every wait.
        report_folder: where logs, and samples of recipes, go.

    Raises:
        ConfigError: planned runs do not support something in the recipe, or one is active.
        DataError, UnsupportedMegatronError: the dataset is missing or damaged; Bridge lacks what runs rely on.
    """
    same: dict[str, Any] = {"context_teams": context_teams, "cluster": cluster, "ahead": ahead, "correct": correct}
    host = Recipe(
        checked(config),
        dataset=checked_dataset(config, dataset),
        costs=recipe.costs_file(config, costs, calibrate_s, timeout_s=timeout_s, report_folder=Path(report_folder)),
        chooses_layers=chooses(layers),
        **same,
        long_samples=LongSamples(long_samples),
        memory_limit_bytes=None if memory_limit_mb is None else int(memory_limit_mb * BYTES_PER_MB),
        store=find_address(None if store_url_file is None else Path(store_url_file), os.environ),
        store_bind=store_bind,
        planner_cores=planner_cores,
        timeout_s=timeout_s,
        report_folder=Path(report_folder),
    )
    with _started(host) as run, planning(config, run):
        yield run


@contextlib.contextmanager
def _started(host: Recipe) -> Iterator[PlannedRecipe]:
    """Its run; where torchrun may start the ranks anew, over a store of this start alone."""
    with in_python():
        if may_start_again():
            renew(host.sources.timeout_s)
        with PlannedRecipe(host) as run:
            yield run


def checked(config: "ConfigContainer") -> Any:
    """A recipe that planned runs support, in a Megatron-Bridge that they can rely on; raises as `planned`."""
    relied_on.check()
    check_recipe(config)
    return config


@contextlib.contextmanager
def planning(config: "ConfigContainer", run: PlannedRecipe) -> Iterator[None]:
    """Have Megatron's factory of schedule functions hand out a run's, and the recipe name the run's samples."""
    if _originals:
        raise ConfigError("expected no planned run to be active yet, got a second one")
    repairs.apply()
    _originals.install(
        [*relied_on.replacements(run.forward_backward, run.before_model, run.close), *relied_on.shared()]
    )
    try:
        with changed(config, dataset=PlannedDataset(run.datasets)), per_token(config):
            yield
    finally:
        _originals.revert()
        repairs.revert()


@contextlib.contextmanager
def per_token(config: "ConfigContainer") -> Iterator[None]:
    """Have gradients be sums over learned tokens, divided once by their number."""
    with changed(of_model(config), calculate_per_token_loss=True), changed(config.ddp, average_in_collective=False):
        yield
