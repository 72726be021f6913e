"""Where plans come from: sampler → planner → verified plan → bytes."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dynapipe.plan.codec import encode_entries
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.sampling import LengthTable, Sampler, read_task_ids
from megatron_dynapipe.service.recalibration import MemoryBoundPlanner
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings

logger = logging.getLogger(__name__)


class PlannedSplits:
    """Plans of a dataset on disk: the same arguments give the same bytes, whenever and wherever they are asked for."""

    def __init__(
        self,
        inputs: PlanInputs,
        training_planner: Callable[[int], MemoryBoundPlanner] | None = None,
    ) -> None:
        """Read lengths and costs.

        Args:
            inputs: what plans are made from.
            training_planner: the planner of each training iteration, where it is not the same for all.

        Raises:
            DataError: the dataset is missing or damaged, or holds samples that are too long.
            CostModelError: the cost model is damaged or does not fit the settings.
            InfeasibleError: the model alone does not fit.
        """
        self._planner = Planner(inputs.planner, inputs.costs.load())
        self._training_planner = training_planner
        self._forward_only = {split.name: split.forward_only for split in inputs.splits}
        self._samplers = {split.name: split_sampler(Path(inputs.data_folder), split) for split in inputs.splits}
        for name, sampler in self._samplers.items():
            logger.info("%s: %s", name, sampler.report)

    def entries(self, split: str, iteration: int) -> Sequence[tuple[int, int, bytes]]:
        """(replica, stage, bytes) for every rank's share of one iteration."""
        batch = self._samplers[split].batch(iteration)
        forward_only = self._forward_only[split]
        planner: Planner | MemoryBoundPlanner = self._planner
        if self._training_planner is not None and not forward_only:
            planner = self._training_planner(iteration)
        return encode_entries(planner.plan(batch, iteration, forward_only=forward_only))


def split_sampler(folder: Path, split: SplitSettings) -> Sampler:
    """The sampler of a split of a dataset folder; raises DataError and ConfigError as it does."""
    lengths = LengthTable.read(folder, split.name)
    needed = split.sampler.needs_tasks
    return Sampler(lengths, split.sampler, read_task_ids(folder, split.name, len(lengths)) if needed else None)
