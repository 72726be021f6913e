"""One batch of another trainer, planned: which samples run together, on which replica, in which order of passes."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.costs import LARGEST_COORDINATE
from megatron_dynapipe.core.errors import ConfigError, CostModelError, PlanningError
from megatron_dynapipe.core.instructions import Pass, format_instruction
from megatron_dynapipe.core.plan import MicroBatch, StagePlan
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, BatchLayout, ModelFamily
from megatron_dynapipe.costing import CostModel, LayerSplit, TableCostModel, model_of_layers
from megatron_dynapipe.sampling import GlobalBatch

_MOST = 100_000
"""Layers, or ranks of one kind, that anybody has."""
_SET_HERE = {"model", "modules_per_stage", "memory_limit_bytes", "replicas_in_step", "slices"}
"""Fields of `PlannerSettings` that follow from the other arguments."""
_OF_LAYERS = ("layers_per_stage", "expert_layers")
"""Settings that say in layers what those fields say in modules."""
_LEAST_TARGET = 3  # a token, the one that starts it and the one that ends it


class PlannedBatch(NamedTuple):
    """A planned batch.

    Attributes:
        micro_batches: every replica's, in the order in which they enter its pipeline; `sample_ids` are places in the
            lengths given, `layout` says whether they are padded to the longest or packed in one row.
        passes: every replica's and stage's, in order: "F3" is the forward pass of its micro-batch 3, "B3" its backward.
        predicted_ms: time of forward and backward passes and messages, on the slowest replica.
    """

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    passes: tuple[tuple[tuple[str, ...], ...], ...]
    predicted_ms: float

    @property
    def samples(self) -> list[list[list[int]]]:
        """Places in the lengths given: of every replica, micro-batch and row."""
        return [[list(micro_batch.sample_ids) for micro_batch in replica] for replica in self.micro_batches]


def plan_batch(
    lengths: Iterable[int] | Iterable[Sequence[int]],
    costs: CostModel | str | Path,
    *,
    layers: int | tuple[int, int],
    memory_mb: float,
    equal_counts: bool = False,
    **settings: object,
) -> PlannedBatch:
    """Divide a batch into micro-batches, those over replicas, and order their passes; torch is not needed.

    Args:
        lengths: positions of every sample, or pairs, of its input and its target, for an encoder–decoder model.
        costs: the costs of the user's own model: a cost model, as `cost.AnalyticCostModel`, or the path of a file.
        layers: the whole model's, or its encoder's and its decoder's.
        memory_mb: memory of one device (1e6 bytes), model state included; a device holds one stage.
        equal_counts: for trainers whose replicas run in step: as many micro-batches on each, alike in time
            at each position.
        settings: further fields of `PlannerSettings`, as `data_parallel` or `recompute`; `layers_per_stage`, equal
            without it; and `expert_layers`, those with experts where others have none. Without them `hidden_size` is
            that of the costs, and `micro_batch_layouts` are both.

    Raises:
        ConfigError: lengths, or settings, that are not what is expected.
        CostModelError: costs that cannot be read, or do not go with the settings.
        PlanningError: no sample, or a number that does not divide where `equal_counts` is asked for.
        InfeasibleError: some sample does not fit; the message names it, the stage and the memory.
    """
    model = TableCostModel.load(Path(costs)) if isinstance(costs, str | Path) else costs
    planner = planner_of(planner_settings(model, layers, memory_mb, equal_counts, settings), model)
    batch = batch_of(lengths, model.family)
    plan = planner.plan(batch, 0)
    if any(micro_batch.is_filler for replica in plan.replicas for micro_batch in replica.micro_batches):
        raise PlanningError(
            f"{len(batch)} samples cannot be divided into equally many micro-batches on each of"
            f" {len(plan.replicas)} replicas",
            hint="use a global batch that the replicas divide",
        )
    return PlannedBatch(
        micro_batches=tuple(replica.micro_batches for replica in plan.replicas),
        passes=tuple(tuple(_passes(stage) for stage in replica.stages) for replica in plan.replicas),
        predicted_ms=plan.totals.predicted_ns / 1e6,
    )


def planner_settings(
    model: CostModel, layers: int | tuple[int, int], memory_mb: float, in_step: bool, settings: Mapping[str, Any]
) -> PlannerSettings:
    """Settings of plans, from the arguments of `plan_batch`; raises ConfigError and CostModelError as it does."""
    known = [*_OF_LAYERS, *(name for name in PlannerSettings.__struct_fields__ if name not in _SET_HERE)]
    if unknown := sorted(set(settings) - set(known)):
        raise ConfigError(
            f"expected settings among {', '.join(known)}, got {', '.join(unknown)}",
            hint="samples are whole, replicas run in step by equal_counts, and the family of the model is the costs'",
        )
    if model.hidden_size is None and "hidden_size" not in settings:
        raise CostModelError(f"{model.name} does not say the hidden size of its model", hint="give hidden_size")
    encoder, decoder = layers if isinstance(layers, tuple) else (layers, 0)
    sizes: dict[str, Any] = {"layers": encoder, "layers of the decoder": decoder, **settings}
    for name in ("layers", "layers of the decoder", "data_parallel", "tensor_parallel", "pipeline_parallel", "chunks"):
        if isinstance(size := sizes.get(name), int) and size > _MOST:
            raise ConfigError(f"expected {name} of at most {_MOST}, got {size}")
    if not isinstance(memory_mb, int | float) or not 0 < memory_mb < math.inf:
        raise ConfigError(f"expected memory_mb above 0, in megabytes of one device, got {memory_mb}")
    try:
        stacks = model_of_layers(
            model.family,
            msgspec.convert(encoder, int),
            msgspec.convert(decoder, int),
            expert_layers=msgspec.convert(settings.get("expert_layers", ()), tuple[int, ...]),
        )
        split = msgspec.convert(settings.get("layers_per_stage"), LayerSplit | None)
        chosen = {
            "hidden_size": model.hidden_size,
            "micro_batch_layouts": tuple(BatchLayout),
            **{name: value for name, value in settings.items() if name not in _OF_LAYERS},
            "model": stacks,
            "modules_per_stage": None if split is None else stacks.modules_of(split),
            "memory_limit_bytes": round(memory_mb * BYTES_PER_MB),
            "replicas_in_step": settings.get("data_parallel", 1) if in_step else 1,
        }
        return msgspec.convert(chosen, PlannerSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"expected settings of PlannerSettings: {error}") from error


def batch_of(lengths: Iterable[Any], family: ModelFamily) -> GlobalBatch:
    """Lengths in tokens: a decoder-only model runs all but the last one, and a T5's targets have two more."""
    if not isinstance(lengths, Iterable):
        raise ConfigError(f"expected the lengths of samples, got {lengths!r}")
    positions = [_positions(place, sample, family) for place, sample in enumerate(lengths)]
    tokens = np.array(positions, np.int32).reshape(-1, 2) + ((0, -2) if family.is_encoder_decoder else (1, 0))
    return GlobalBatch.of_lengths(*tokens.T)


def _positions(place: int, sample: Any, family: ModelFamily) -> tuple[int, int]:
    """A sample's positions of input and of target; a decoder-only model has no target positions."""
    is_pair = family.is_encoder_decoder
    try:
        first, second = sample if is_pair else (sample, 0)
        positions = operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        positions = 0, 0
    within = all(length <= LARGEST_COORDINATE for length in positions)
    if within and positions[0] >= 1 and (not is_pair or positions[1] >= _LEAST_TARGET):
        return positions
    expected = f"an integer from 1 to {LARGEST_COORDINATE}"
    if is_pair:
        expected = f"a pair: of its input, {expected}, and of its target, from {_LEAST_TARGET}"
    raise ConfigError(
        f"lengths[{place}]: expected the positions of a sample, {expected}, got {sample!r}",
        hint=f"leave out samples without any; the cost model describes a {family} model",
    )


def _passes(stage: StagePlan) -> tuple[str, ...]:
    return tuple(format_instruction(step) for step in stage.instructions if isinstance(step, Pass))
