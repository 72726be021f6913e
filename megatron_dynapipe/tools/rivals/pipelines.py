"""Pipelines as teams set them up by hand: virtual stages by interleaved 1F1B, and splits of whole layers.

equal      4 4 4 4               of four stages, or as equal as can be
by work    4 5 5 2               the busiest virtual stage has the least work; the head may have the last one alone
           2 2 2 2 | 2 3 3 0     with two virtual stages of each rank
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel, even_layer_split
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning.bounds import even_work_layer_split, least_work

CHUNKS = (1, 2, 4)
"""Virtual stages of a rank."""


def by_hand(
    settings: PlannerSettings,
    cost_model: CostModel,
    batch: GlobalBatch,
    *,
    chunks: Sequence[int] = CHUNKS,
    equal: bool = False,
) -> Iterator[PlannerSettings]:
    """The settings with each of these numbers of virtual stages and each split, or the equal one alone.

    Raises:
        CostModelError: the cost model has no table that the settings ask for.
    """
    layers = settings.model.layers
    work = least_work(settings, cost_model, replace(batch, labels=None))  # others run all positions
    for count in (1,) if settings.pipeline_parallel == 1 else chunks:
        stages = settings.pipeline_parallel * count
        if stages > layers:
            return
        interleaved = settings.with_layers_per_stage(even_layer_split(layers, stages))
        yield interleaved
        split = even_work_layer_split(interleaved, [work])
        if not equal and split != interleaved.layout.layers_per_stage:
            yield settings.with_layers_per_stage(split)
