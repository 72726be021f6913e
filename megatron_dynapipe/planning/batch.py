"""One batch of another trainer, planned: which samples run together, on which replica, in which order of passes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_dynapipe.cost import CostModel, TableCostModel
from megatron_dynapipe.errors import ConfigError, CostModelError, PlanningError
from megatron_dynapipe.plan.instructions import Pass
from megatron_dynapipe.plan.iteration import MicroBatch, StagePlan
from megatron_dynapipe.plan.text import format_instruction
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BYTES_PER_MB, BatchLayout, ModelFamily


class PlannedBatch(NamedTuple):
    """A planned batch.

    Attributes:
        micro_batches: of every replica, in the order in which they enter its pipeline; `sample_ids` are places in the
            lengths given, `layout` says whether they are padded to the longest or packed in one row.
        passes: of every replica and stage, in order: "F3" is the forward pass of its micro-batch 3, "B3" its backward.
        predicted_ms: of forward and backward passes and messages, on the slowest replica.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    passes: tuple[tuple[tuple[str, ...], ...], ...]
    predicted_ms: float

    @property
    def samples(self) -> list[list[list[int]]]:
        """Places in the lengths given: of every replica, micro-batch and row."""
        return [[list(each.sample_ids) for each in replica] for replica in self.micro_batches]


def plan_batch(
    lengths: Sequence[int] | Sequence[tuple[int, int]],
    costs: CostModel | str | Path,
    *,
    layers: int | tuple[int, int],
    memory_mb: float,
    equal_counts: bool = False,
    **settings: Any,
) -> PlannedBatch:
    """Divide a batch into micro-batches, those over replicas, and order their passes; torch is not needed.

    Args:
        lengths: positions of every sample, or of its input and target for an encoder–decoder model.
        costs: a cost model, as `cost.AnalyticCostModel`, or the path of a file.
        layers: of the model, or of its encoder and decoder.
        memory_mb: of one device (1e6 bytes).
        equal_counts: for trainers whose replicas run in step: as many micro-batches on each, those of one position
            alike in time.
        settings: others of `planning.settings.PlannerSettings`, as `data_parallel`, `pipeline_parallel`, `recompute`.

    Raises:
        ConfigError, CostModelError: settings or costs that do not go together.
        PlanningError: no sample, or fewer than replicas.
        InfeasibleError: some sample does not fit; the message names it, the stage and the memory.
    """
    model = TableCostModel.load(Path(costs)) if isinstance(costs, str | Path) else costs
    encoder, decoder = layers if isinstance(layers, tuple) else (layers, 0)
    if model.hidden_size is None and "hidden_size" not in settings:
        raise CostModelError(f"{model.name} does not say the hidden size of its model", hint="give hidden_size")
    chosen = {
        "hidden_size": model.hidden_size,
        "micro_batch_layouts": tuple(BatchLayout),
        **settings,
        "family": model.family,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "memory_limit_bytes": round(memory_mb * BYTES_PER_MB),
        "lockstep": equal_counts,
    }
    try:
        planner = Planner(msgspec.convert(chosen, PlannerSettings), model)
    except msgspec.ValidationError as error:
        raise ConfigError(f"expected settings of PlannerSettings: {error}") from error
    plan = planner.plan(_batch(lengths, model.family), 0)
    if any(each.is_filler for replica in plan.replicas for each in replica.micro_batches):
        raise PlanningError(
            f"{len(lengths)} samples cannot be divided into equally many micro-batches on each of"
            f" {len(plan.replicas)} replicas",
            hint="use a global batch that the replicas divide",
        )
    return PlannedBatch(
        micro_batches=tuple(replica.micro_batches for replica in plan.replicas),
        passes=tuple(tuple(_passes(stage) for stage in replica.stages) for replica in plan.replicas),
        predicted_ms=plan.totals.predicted_ns / 1e6,
    )


def _batch(lengths: Sequence[int] | Sequence[tuple[int, int]], family: ModelFamily) -> GlobalBatch:
    """Lengths in tokens, of which a decoder-only model runs all but the last, and a T5's targets have two more."""
    pairs = np.array([each if isinstance(each, tuple) else (each, 0) for each in lengths], np.int64).reshape(-1, 2)
    gpt = family is ModelFamily.GPT
    return GlobalBatch(
        iteration=0,
        sample_ids=np.arange(len(pairs)),
        input_lengths=(pairs[:, 0] + gpt).astype(np.int32),
        target_lengths=(pairs[:, 1] - (0 if gpt else 2)).astype(np.int32),
    )


def _passes(stage: StagePlan) -> tuple[str, ...]:
    return tuple(format_instruction(step) for step in stage.instructions if isinstance(step, Pass))
