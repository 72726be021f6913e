"""The layer split whose busiest stage has the least work, without planning a batch."""

from collections.abc import Sequence

import numpy as np

from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tuning.bounds import Work

type _Reached = tuple[tuple[float, float], tuple[int, ...]]


def even_work_split(settings: PlannerSettings, works: Sequence[Work]) -> tuple[int, ...]:
    """Layers per virtual stage; at least one on each.

    A dynamic program over layers × stages; of splits whose busiest stages are alike, one that is near equal.

    Args:
        settings: the layout.
        works: the least work of batches under its tensor parallelism.
    """
    encoder, decoder, head = np.sum([work.total for work in works], axis=0)
    layers = np.array([encoder] * settings.encoder_layers + [decoder] * settings.decoder_layers)
    layers[-1] += head
    stages, ends = settings.pipeline_parallel * settings.chunks, np.concatenate([[0], np.cumsum(layers)])
    count = len(layers)
    # least[n]: (busiest stage, sum of squares) of the first n layers on the stages so far; the squares even out others.
    least: dict[int, _Reached] = {n: ((ends[n], ends[n] ** 2), (n,)) for n in range(1, count - stages + 2)}
    for stage in range(2, stages + 1):
        following: dict[int, _Reached] = {}
        for n in range(stage, count - stages + stage + 1):
            options = []
            for m, ((busiest, squares), split) in least.items():
                if m < n:
                    work = ends[n] - ends[m]
                    options.append(((max(busiest, work), squares + work**2), (*split, n - m)))
            following[n] = min(options)
        least = following
    return tuple(least[count][1])
