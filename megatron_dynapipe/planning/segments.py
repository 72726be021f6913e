"""Planning for a model divided at named places: which cuts to use, and a planner for the stages between them."""

from collections.abc import Sequence

import numpy as np

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BYTES_PER_MB, ModelFamily, Recompute


def even_split(weights: Sequence[int], stages: int, *, fits: Sequence[Sequence[bool]] | None = None) -> list[int]:
    """The stage of each segment: every stage at least one, the heaviest as light as can be, ties to earlier cuts.

    Args:
        weights: of the segments.
        stages: how many.
        fits: `[first][end]`: whether the segments from `first` up to `end` may be one stage.

    Raises:
        InfeasibleError: no division fits.
    """
    segments, unreachable = len(weights), sum(weights) + 1
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[end]: the lightest heaviest stage over the first `end` segments, and where its last stage begins
    best = [(0, 0)] + [(unreachable, 0)] * segments
    begins: list[list[int]] = []
    for _ in range(stages):
        following = [(unreachable, 0)]
        for end in range(1, segments + 1):
            candidates = [
                (max(best[first][0], sums[end] - sums[first]), first)
                for first in range(end)
                if best[first][0] < unreachable and (fits is None or fits[first][end])
            ]
            following.append(min(candidates, default=(unreachable, 0)))
        begins.append([first for _, first in following])
        best = following
    if best[segments][0] >= unreachable:
        raise InfeasibleError(
            f"no division of {segments} segments into {stages} stages fits the memory",
            hint="use more stages, or smaller batches",
        )
    stage_of, end = [0] * segments, segments
    for stage in reversed(range(stages)):
        first = begins[stage][end]
        stage_of[first:end] = [stage] * (end - first)
        end = first
    return stage_of


def even_split_of_costs(
    costs: SegmentCosts, points: Sequence[str], stages: int, memory_limit_bytes: int | None = None
) -> list[int]:
    """Divide segments by their measured times, within memory.

    Args:
        costs: of the segments between the points.
        points: names of the cuts, in order.
        stages: how many.
        memory_limit_bytes: of one device; it has to hold a stage's parameters, gradients and optimizer state, and one
            micro-batch of the largest shape measured.

    Raises:
        ConfigError: the costs are of other segments.
        InfeasibleError: no division fits the memory.
    """
    if tuple(points) != costs.points:
        raise ConfigError(
            f"expected costs of segments divided at {', '.join(points)}, got those of {', '.join(costs.points)}",
            hint="profile the model with the same split points",
        )
    weights = [round(segment.total_ms() * 1e6) for segment in costs.segments]
    fits = None
    if memory_limit_bytes is not None:
        needed = [segment.state_mb + segment.largest_mb() for segment in costs.segments]
        fits = [
            [sum(needed[first:end]) * BYTES_PER_MB <= memory_limit_bytes for end in range(len(needed) + 1)]
            for first in range(len(needed))
        ]
    return even_split(weights, stages, fits=fits)


def segment_settings(
    costs: SegmentCosts,
    stage_of: Sequence[int],
    *,
    stages: int,
    replicas: int,
    memory_limit_bytes: int,
    network: Network | None = None,
    schedule: ScheduleSettings | None = None,
) -> PlannerSettings:
    """Settings of a planner that takes every virtual stage for one layer, as `costs.of_stages` does.

    Args:
        costs: of the segments.
        stage_of: the virtual stage of each segment.
        stages: ranks of a pipeline.
        replicas: of the pipeline.
        memory_limit_bytes: of one device.
        network: links between devices; by default those that the costs were measured with.
        schedule: how passes are ordered.
    """
    virtual, state = stage_of[-1] + 1, costs.state_bytes(stage_of)
    return PlannerSettings(
        family=ModelFamily.GPT,
        encoder_layers=virtual,
        hidden_size=costs.bytes_per_position(stage_of),
        element_bytes=1,
        data_parallel=replicas,
        pipeline_parallel=stages,
        chunks=virtual // stages,
        memory_limit_bytes=memory_limit_bytes,
        recompute=(Recompute.NONE,),
        network=network or Network.over(costs.links, devices_per_node=8),
        model_state_bytes=tuple(sum(state[rank::stages]) for rank in range(stages)),
        schedule=schedule or ScheduleSettings(),
    )


def batch_of_positions(lengths: Sequence[int], iteration: int) -> GlobalBatch:
    """A global batch of samples of so many positions, for `Planner.plan`; sample ids are places in it.

    A sample of n positions counts as n + 1 tokens: a decoder-only one trains on one position less than it has.
    """
    tokens = np.asarray(lengths, np.int32) + 1
    return GlobalBatch(
        iteration=iteration,
        sample_ids=np.arange(len(tokens)),
        input_lengths=tokens,
        target_lengths=np.zeros_like(tokens),
    )
