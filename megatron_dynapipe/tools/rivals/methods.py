"""Ways to make micro-batches, compared by their predictions.

    dynapipe            the planner: padded or packed micro-batches, as the settings allow
    packed_rows         rows of the maximum length, attention kept apart, filled first fit decreasing
    verl, slime         rows as these trainers pack them (`ways.rivals.rules`)
    bridge              rows of 8,192 positions, first fit decreasing, as Megatron-Bridge packs a dataset beforehand
    token_based         sorted, a fixed number of padded positions to a micro-batch
    uniform             sorted, a fixed number of samples to a micro-batch
    packing             rows of the maximum length in which samples attend to one another, as in 2023: every row costs
                        what one sample of the maximum length costs (https://arxiv.org/abs/2311.10418 compares with it)
    padding             every sample padded to the maximum length

All but the first take one recompute mode, and of several sizes of micro-batches the one of least predicted time. The
rows of other trainers run in pipelines set up by hand (`tools.rivals.pipelines`); the fastest pipeline counts.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.memory import peak_bytes
from megatron_dynapipe.core.plan import IterationPlan, idle_share
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import (
    BYTES_PER_MB,
    BatchLayout,
    ModelFamily,
    input_positions,
    round_up,
    target_positions,
)
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.ways.rivals.packed import pack
from megatron_dynapipe.ways.rivals.rules import RIVALS
from megatron_dynapipe.ways.rivals.settings import TITLES, PartitionAlgorithm, PartitionSettings, in_rows

BRIDGE = "bridge"
BRIDGE_ROW = 8192
TRAINERS = ("packed_rows", *RIVALS, BRIDGE)
NAMES = {**TITLES, BRIDGE: "rows packed as Megatron-Bridge does"}
"""What trainers' rows are, for people."""
METHODS = ("dynapipe", *TRAINERS, "token_based", "uniform", "packing", "padding")


class Longest(NamedTuple):
    """Positions that padding pads to and rows are packed into, multiples of 8; targets 0 for decoder-only models."""

    inputs: int
    targets: int

    @classmethod
    def of_tokens(cls, family: ModelFamily, tokens: int, target_tokens: int) -> "Longest":
        """Make it of maximum lengths in tokens."""
        return cls(round_up(input_positions(family, tokens)), round_up(target_positions(family, target_tokens)))


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of one method on one batch.

    Attributes:
        ms: predicted time of the iteration: forward, backward and transfers.
        tokens_per_second: real tokens, without padding, over that time.
        peak_memory_mb: peak memory of the stage that needs most.
        padding_efficiency: real tokens over positions, from 0 to 1.
        shapes: different shapes of micro-batches.
        idle: share of all stages' time in which no pass runs.
    """

    ms: float
    tokens_per_second: float
    peak_memory_mb: float
    padding_efficiency: float
    micro_batches: int
    shapes: int
    idle: float


def predict_fastest(
    method: str, batch: GlobalBatch, longest: Longest, pipelines: Iterable[PlannerSettings], cost_model: CostModel
) -> Prediction:
    """`predict` in the fastest of some pipelines; raises as it does where there is no plan in any."""
    predictions: list[Prediction] = []
    error: PlanningError | None = None
    for pipeline in pipelines:
        try:
            predictions.append(predict(method, batch, longest, pipeline, cost_model))
        except PlanningError as refusal:
            error = error or refusal
    if error is not None and not predictions:
        raise error
    return min(predictions, key=lambda prediction: prediction.ms)


def predict(
    method: str, batch: GlobalBatch, longest: Longest, settings: PlannerSettings, cost_model: CostModel
) -> Prediction:
    """One method's prediction of a batch, in a pipeline as the settings have it.

    Args:
        method: a name of `METHODS`.
        batch: the samples' lengths.
        longest: what padding pads to and rows are packed into.
        settings: model, layout, memory and links; what the method itself decides is replaced.
        cost_model: what layers cost.

    Raises:
        PlanningError: the method has no plan.
        DataError: a sample is longer than what it is to be padded to.
        ConfigError: a sample is longer than a row.
    """
    planned = rows_of_longest(batch, longest, settings.model.family) if method == "packing" else batch
    planner = planner_of(method_settings(method, longest, settings), cost_model)
    return prediction_of(planner.plan(planned, 0), tokens=batch.tokens)


def prediction_of(plan: IterationPlan, *, tokens: int) -> Prediction:
    """The prediction of a plan for a batch of so many real tokens."""
    totals = plan.totals
    micro_batches = [micro_batch for replica in plan.replicas for micro_batch in replica.micro_batches]
    peaks = [peak_bytes(plan, replica, stage.stage) for replica in plan.replicas for stage in replica.stages]
    return Prediction(
        ms=totals.predicted_ns / 1e6,
        tokens_per_second=tokens / totals.predicted_ns * 1e9,
        peak_memory_mb=max(peaks) / BYTES_PER_MB,
        padding_efficiency=min(tokens / totals.padded_positions, 1.0),
        micro_batches=len(micro_batches),
        shapes=len({micro_batch.shape for micro_batch in micro_batches}),
        idle=idle_share(tuple(s.predicted for replica in plan.replicas for s in replica.stages), totals.predicted_ns),
    )


def method_settings(method: str, longest: Longest, settings: PlannerSettings) -> PlannerSettings:
    """The settings with which a method is predicted.

    Packed rows of others run as they are trained: 1F1B, interleaved with virtual stages.
    """
    replace = msgspec.structs.replace
    if method == "dynapipe":
        return replace(settings, partition=None)
    settings = replace(settings, slices="off", context_teams=1)
    if method in TRAINERS:
        if method == BRIDGE:
            row = Longest(max(longest.inputs, BRIDGE_ROW), longest.targets and max(longest.targets, BRIDGE_ROW))
            partition = _with_longest(PartitionAlgorithm.PACKED_ROWS, row)
            partition = replace(partition, micro_batch_size=1)
        else:
            partition = _with_longest(PartitionAlgorithm(method), longest)
        return in_rows(settings, partition)
    algorithm = PartitionAlgorithm.UNIFORM if method == "packing" else PartitionAlgorithm(method)
    partition = _with_longest(algorithm, longest) if method == "padding" else PartitionSettings(algorithm=algorithm)
    return replace(settings, micro_batch_layouts=(BatchLayout.PADDED,), partition=partition)


def _with_longest(algorithm: PartitionAlgorithm, longest: Longest) -> PartitionSettings:
    return PartitionSettings(
        algorithm=algorithm, padded_input_length=longest.inputs, padded_target_length=longest.targets or None
    )


def rows_of_longest(batch: GlobalBatch, longest: Longest, family: ModelFamily) -> GlobalBatch:
    """The batch as rows of the longest length, each a sample for the planner: packing without masks.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    if not len(batch):
        return batch
    inputs = np.array([input_positions(family, n) for n in batch.input_lengths.tolist()], np.int64)
    targets = np.array([target_positions(family, n) for n in batch.target_lengths.tolist()], np.int64)
    count = len(pack(inputs, targets, *longest))
    if family.is_encoder_decoder:
        return GlobalBatch.of_lengths([longest.inputs] * count, longest.targets - 2, iteration=batch.iteration)
    return GlobalBatch.of_lengths([longest.inputs + 1] * count, 0, iteration=batch.iteration)
