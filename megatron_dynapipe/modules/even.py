"""Which cuts to use where there are more than stages: consecutive segments, the heaviest stage as light as can be."""

from collections.abc import Sequence

from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.units import BYTES_PER_MB


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
