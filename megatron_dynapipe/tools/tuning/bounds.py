"""Lower bounds on the time of every plan of a batch, found without planning it.

Sample i takes at least its least share of any micro-batch that it may be in (`choosing.least_costs`). Then with all
samples' shares on a stage's modules, a replica's busiest stage works for `work / replicas`, after a micro-batch has
come through the stages before it and before one has gone back through them. However small it is, a micro-batch takes
the least of all costs: launching kernels takes time.

The same work gives the layer split whose busiest stage has the least of it, without planning a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.choosing.evenest import evenest
from megatron_dynapipe.choosing.least_costs import BOTH, LeastCosts
from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.choosing.planners import tables_of
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.costing import CostModel, Kind, Links, PipelineLayout
from megatron_dynapipe.sampling import GlobalBatch

CHARGED = ((1, 1), (1, 0), (0, 1))
"""Whether inputs' and targets' positions count when a packed row's positions are charged to its samples."""
_ROUNDING_NS = 2.0
"""How far the planner's integer interpolation may come out below exact costs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastWork:
    """The least work of one batch under one tensor parallelism, in ns: forward and backward.

    Attributes:
        kinds: the kinds of modules.
        samples: bounds of every sample on a module of each kind: `[samples, kinds]`.
        total: the bound of all samples: `[kinds]`; at least the sum of `samples`.
        floor: the bound of any micro-batch: `[kinds]`.
        counted: share of the positions that the last MLP and the head run, which bounds leave out where it is below 1.
    """

    kinds: tuple[Kind, ...]
    samples: Floats
    total: Floats
    floor: Floats
    counted: float = 1.0


def least_work(settings: PlannerSettings, cost_model: CostModel, batch: GlobalBatch) -> LeastWork:
    """The least work of a batch under the settings' tensor parallelism, layouts and recompute modes."""
    samples = Samples.of(batch, settings.model.family, settings.length_multiple)
    lengths = samples.input_positions, samples.target_positions
    packs, pads = (layout in settings.micro_batch_layouts for layout in (BatchLayout.PACKED, BatchLayout.PADDED))
    tables = tables_of(settings, cost_model)
    modes = [LeastCosts(of_mode, padded=pads, packed=packs) for of_mode in tables]
    by_measure = [
        _known([mode.share(BOTH, *lengths, charged=charged) for mode in modes])
        for charged in (CHARGED if lengths[1].any() else CHARGED[:1])
    ]
    floor = [mode.whole(BOTH, *lengths).min(axis=0, initial=np.inf) for mode in modes]
    if packs and any(of_mode.packed is None for of_mode in tables):
        # A row's cost is then a mean of its samples' costs at the row's positions, weighted by their own positions over
        # the row's; rounding the row up takes these weights below 1 together.
        shortest = int((lengths[0] + lengths[1]).min(initial=1))
        axes = 2 if lengths[1].any() else 1
        floor = [least * shortest / (shortest + axes * (settings.length_multiple - 1)) for least in floor]
    return LeastWork(
        kinds=tables[0].kinds,
        samples=by_measure[0],
        total=np.stack([shares.sum(axis=0) for shares in by_measure]).max(axis=0),
        floor=_known(floor),
        counted=1.0 if samples.labels is None else float(samples.labels.sum() / samples.input_positions.sum()),
    )


def _known(costs: Sequence[Floats]) -> Floats:
    """The least of modes' costs in ns, less what the planner's rounding takes of them; 0 where nothing is known."""
    least = np.stack(costs).min(axis=0)
    return np.where(np.isfinite(least), np.maximum(np.floor(least) - _ROUNDING_NS, 0.0), 0.0)


def least_ns(settings: PlannerSettings, work: LeastWork, *, any_split: bool = False) -> int:
    """A time that the predicted time of every plan of the batch reaches."""
    layout = settings.layout
    links = links_of(settings)
    latency = links.latency_ns.min(axis=0)
    modules = _counts(layout, work).sum(axis=0)
    through = max(float((work.samples @ modules).max(initial=0)), float(work.floor @ modules)) + 2 * float(
        latency.sum()
    )
    if any_split:
        busiest = float(work.total @ modules) / layout.stages / settings.data_parallel
    else:
        busiest = _busiest_ns(layout, links, work, settings.data_parallel)
    return int(max(through, busiest) * (1 - 1e-9))


def _counts(layout: PipelineLayout, work: LeastWork) -> npt.NDArray[np.int64]:
    """Modules that run all positions: `[virtual stages, kinds]`."""
    counts = layout.counts(work.kinds).copy()
    last = len(layout.modules) - 1
    for module in (last - 1, last) if work.counted < 1 else ():
        counts[np.searchsorted(layout.cuts, module, side="right"), work.kinds.index(layout.modules[module])] -= 1
    return counts


def _busiest_ns(layout: PipelineLayout, links: Links, work: LeastWork, replicas: int) -> float:
    counts = _counts(layout, work).T
    total, samples, floor = (least @ counts for least in (work.total, work.samples, work.floor))
    busy = total.reshape(layout.chunks, layout.stages).sum(axis=0) / replicas
    first = samples[:, : layout.stages]  # [samples, stages], of the first chunk
    before = np.zeros((len(first), layout.stages))
    before[:, 1:] = np.cumsum(first, axis=1)[:, :-1]
    least = np.cumsum(floor[: layout.stages])
    before[:, 1:] = np.maximum(before[:, 1:], least[:-1])
    crossed = np.zeros(layout.stages)
    crossed[1:] = 2 * np.cumsum(links.latency_ns.min(axis=0)[: layout.stages - 1])
    return float((busy + before.min(axis=0, initial=np.inf) + crossed).max()) if len(first) else 0.0


def even_work_layer_split(settings: PlannerSettings, works: Sequence[LeastWork]) -> tuple[int, ...]:
    """Layers per virtual stage, the busiest with the least work; a GPT's last stage may have the head alone."""
    stages = settings.pipeline_parallel * settings.chunks
    *layers, head = layer_work(settings, works)
    if settings.model.decoder:  # whose stages all have layers
        return evenest([*layers[:-1], layers[-1] + head], stages)
    *others, last = evenest([*layers, head], stages)
    return (*others, last - 1)


def layer_work(settings: PlannerSettings, works: Sequence[LeastWork]) -> list[int]:
    """Least work of all batches on each layer, and on the head, in ns."""
    total = dict(zip(works[0].kinds, np.sum([work.total for work in works], axis=0).tolist(), strict=True))
    *modules, head = (total[kind] for kind in settings.layout.modules)
    counted = float(np.mean([work.counted for work in works]))
    modules[-1] *= counted
    layers = np.array(modules).reshape(-1, settings.layout.model.modules_per_layer).sum(axis=1)
    return [round(work) for work in (*layers.tolist(), head * counted)]
