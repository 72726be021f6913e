"""Planning a divided model's micro-batches by the measured costs of its segments."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.modules.inputs import Batch, batch_rows, has_rows
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch
from megatron_dynapipe.plan.transfer_rules import GLOO_RULES, TransferRules, cuda_rules
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.samples import batch_of_positions
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import segment_settings


class ModulePlanner:
    """A `Planner` for the stages of a divided model; every virtual stage counts as one layer with its own costs.

    Args:
        costs: of the segments, or the path of their file.
        stage_of: the virtual stage of each segment, `part.stage_of`.
        stages: ranks of a pipeline.
        replicas: of the pipeline.
        memory_limit_bytes: of one device.
        network: links between devices; by default those that the costs were measured with.
        schedule: how passes are ordered.
        transfers: when transfers are started; None takes the rules of GPUs where there is one, else those of gloo.

    Attributes:
        planner: what plans.
        stages, replicas: as given.
    """

    def __init__(
        self,
        costs: SegmentCosts | str | Path,
        stage_of: Sequence[int],
        *,
        stages: int,
        replicas: int = 1,
        memory_limit_bytes: int,
        network: Network | None = None,
        schedule: ScheduleSettings | None = None,
        transfers: TransferRules | None = None,
    ) -> None:
        self.stages, self.replicas = stages, replicas
        costs = costs if isinstance(costs, SegmentCosts) else SegmentCosts.load(Path(costs))
        settings = segment_settings(
            costs,
            stage_of,
            stages=stages,
            replicas=replicas,
            memory_limit_bytes=memory_limit_bytes,
            network=network,
            schedule=schedule,
        )
        if transfers is None:
            transfers = cuda_rules(os.environ) if torch.cuda.is_available() else GLOO_RULES
        settings = msgspec.structs.replace(settings, transfers=transfers)
        self.planner = Planner(settings, costs.of_stages(stage_of))
        self._alone = self.planner if replicas == 1 else _for_one_replica(self.planner)

    @property
    def digest(self) -> str:
        """Of everything that plans depend on besides lengths."""
        return self.planner.digest

    def plan(self, lengths: Sequence[int], iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """The plan of a global batch over all replicas.

        Args:
            lengths: of its samples, in positions; a micro-batch's sample ids are places in it.
            iteration: its number.
            forward_only: no backward passes.

        Raises:
            PlanningError, InfeasibleError: as `Planner.plan`.
        """
        return self.planner.plan(batch_of_positions(lengths, iteration), iteration, forward_only=forward_only)

    def share(self, batch: Batch, *, forward_only: bool = False) -> tuple[list[dict[str, Any]], IterationPlan]:
        """One replica's batch as planned micro-batches, each trimmed to the length of its longest sample.

        Lengths are the sums of the batch's "attention_mask", if it has one, else the second dimension of its first
        tensor. Padding is expected at the end of each row.
        """
        lengths = _lengths(batch)
        plan = self._alone.plan(batch_of_positions(lengths, 0), 0, forward_only=forward_only)
        return [_rows(batch, micro_batch) for micro_batch in plan.replicas[0].micro_batches], plan


def _for_one_replica(planner: Planner) -> Planner:
    return Planner(msgspec.structs.replace(planner.settings, data_parallel=1), planner.cost_model)


def _lengths(batch: Batch) -> list[int]:
    rows = batch_rows(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return [max(int(n), 1) for n in mask.sum(1).tolist()]
    widths = [value.shape[1] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 1]
    if not widths:
        raise DataError("expected a batch with a tensor of samples × positions, or an attention_mask, to plan")
    return [widths[0]] * rows


def _rows(batch: Batch, micro_batch: MicroBatch) -> dict[str, Any]:
    """The samples of a micro-batch, cut off at its longest one's end."""
    rows, width = batch_rows(batch), max(_lengths(batch))
    ids, longest = torch.tensor(micro_batch.sample_ids), max(micro_batch.input_lengths) - 1
    found = {}
    for key, value in batch.items():
        if has_rows(value, rows):
            value = value[ids]
            if value.dim() > 1 and value.shape[1] >= width:
                value = value[:, :longest]
        found[key] = value
    return found
