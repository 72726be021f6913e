"""Lower bounds on the time of every plan of a batch, found without planning it.

Sample i takes at least its smallest share of any micro-batch that it may be in: over all sizes b, and all lengths at
least its own, of cost(b, lengths) / b. Costs are linear between grid points, so the least share is that of a grid
point or of the sample's own length; costs are first made to rise with length:

    measured   ╱╲╱           envelope[L] = the least of measured[L …]
              ╱      ──►              __╱
                                    ╱

Packed rows derived from padded costs charge a sample the same shares. Where packed rows were measured, a row costs at
least its positions times the least cost of a position, and the attention of its samples.

Then with all samples' shares on a stage's modules, a replica's busiest stage works for `work / replicas`, after a
micro-batch has come through the stages before it and before one has gone back through them. However small it is, a
micro-batch takes the least of all costs: launching kernels takes time.

The same work gives the layer split whose busiest stage has the least of it, without planning a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost import ABSENT, CostModel, CostTables, Kind, Links, PackedTables, PipelineLayout, Quantity
from megatron_dynapipe.cost.tables import at_point
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.segments import evenest
from megatron_dynapipe.units import LENGTH_MULTIPLE, BatchLayout

Reals = npt.NDArray[np.float64]

_ROUNDING_NS = 2.0
"""By how much the planner's integer interpolation may come out below exact costs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastWork:
    """The least work of one batch under one tensor parallelism, in ns: forward and backward.

    Attributes:
        kinds: of modules.
        samples: of every sample on a module of each kind: `[samples, kinds]`.
        total: of all samples: `[kinds]`; at least the sum of `samples`.
        floor: of any micro-batch: `[kinds]`.
        counted: share of the positions that the last MLP and the head run, which bounds leave out where it is below 1.
    """

    kinds: tuple[Kind, ...]
    samples: Reals
    total: Reals
    floor: Reals
    counted: float = 1.0


def least_work(settings: PlannerSettings, cost_model: CostModel, batch: GlobalBatch) -> LeastWork:
    """The least work of a batch under the settings' tensor parallelism, layouts and recompute modes."""
    samples = Samples.of(batch, settings.family)
    modes = [settings.tables(cost_model, mode) for mode in settings.recompute]
    packs, pads = (layout in settings.micro_batch_layouts for layout in (BatchLayout.PACKED, BatchLayout.PADDED))
    kinds = modes[0].kinds
    floor = np.full(len(kinds), np.inf)
    for tables in modes:
        if pads or tables.packed is None:
            floor = np.minimum(floor, _floor(tables, samples, LENGTH_MULTIPLE if packs else 1))
        if packs and tables.packed is not None:
            floor = np.minimum(floor, _packed_floor(tables.packed))
    # By whichever positions packed rows are charged: inputs, targets, or both.
    by_measure = []
    for measure in range(3):
        least = np.full((len(batch), len(kinds)), np.inf)
        for tables in modes:
            measured = packs and tables.packed is not None
            if pads or (packs and not measured):
                least = np.minimum(least, _shares(tables, samples))
            if measured:
                assert tables.packed is not None
                least = np.minimum(least, _packed_shares(tables.packed, samples, measure))
        by_measure.append(np.where(np.isfinite(least), least, 0.0))
    total = np.max([shares.sum(axis=0) for shares in by_measure], axis=0)
    floor = np.where(np.isfinite(floor), floor, 0.0)
    counted = 1.0 if samples.labels is None else float(samples.labels.sum() / samples.input_positions.sum())
    return LeastWork(kinds=kinds, samples=by_measure[-1], total=total, floor=floor, counted=counted)


def least_ns(settings: PlannerSettings, work: LeastWork, *, any_split: bool = False) -> int:
    """A time that the predicted time of every plan of the batch reaches."""
    layout, links = settings.layout, settings.links
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
    counts, last = layout.counts(work.kinds).copy(), len(layout.modules) - 1
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


def _shares(tables: CostTables, samples: Samples) -> Reals:
    """Shares of padded micro-batches, and packed rows derived from them: `[samples, kinds]`, infinite if unknown."""
    return np.asarray(np.maximum((_by_size(tables, samples) / tables.sizes).min(axis=-1) - _ROUNDING_NS, 0))


def _floor(tables: CostTables, samples: Samples, row_multiple: int) -> Reals:
    """The least of any padded micro-batch, and of any packed row derived from them: `[kinds]`.

    A row's cost is a mean of its samples' costs at the row's positions, weighted by their own positions over the row's;
    rounding the row up takes these weights below 1 together.
    """
    least = (_by_size(tables, samples).min(axis=(0, 2), initial=np.inf) - _ROUNDING_NS).clip(min=0)
    shortest = int((samples.input_positions + samples.target_positions).min(initial=1))
    axes = 1 if not samples.target_positions.any() else 2
    return np.asarray(least * shortest / (shortest + axes * (row_multiple - 1)))


def _by_size(tables: CostTables, samples: Samples) -> Reals:
    """Forward and backward of each kind at every size, rising with length: `[samples, kinds, sizes]`."""
    values = tables.values if tables.separate is None else tables.separate
    rising = replace(tables, separate=_envelope(values), packed=None)
    costs = rising.at_lengths(samples.input_positions, samples.target_positions, separate=True)
    known = np.where(costs == ABSENT, np.inf, costs)
    return np.asarray(known[:, :, Quantity.FORWARD] + known[:, :, Quantity.BACKWARD])


def _envelope(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The least value at lengths of at least a point's own, along both axes of `[…, inputs, targets]`."""
    known = np.where(values == ABSENT, np.iinfo(np.int64).max, values)
    for axis in (-1, -2):
        known = np.flip(np.minimum.accumulate(np.flip(known, axis), axis=axis), axis)
    return np.where(known == np.iinfo(np.int64).max, ABSENT, known)


def _packed_floor(packed: PackedTables) -> Reals:
    """The least of any measured packed row: `[kinds]`."""
    known = np.where(packed.linear == ABSENT, np.inf, packed.linear)
    least = (known[:, Quantity.FORWARD] + known[:, Quantity.BACKWARD]).min(axis=(1, 2), initial=np.inf)
    return np.asarray(np.maximum(least - _ROUNDING_NS, 0))


def _packed_shares(packed: PackedTables, samples: Samples, measure: int) -> Reals:
    """Shares of measured packed rows, whose linear part is charged by inputs (0), targets (1) or both (2)."""
    inputs, targets = packed.row_inputs[:, None], packed.row_targets[None, :]
    positions = (inputs + 0 * targets, targets + 0 * inputs, inputs + targets)[measure]
    charged = (samples.input_positions, samples.target_positions, samples.input_positions + samples.target_positions)
    both = [Quantity.FORWARD, Quantity.BACKWARD]
    times = packed.attention[:, both].reshape(-1, *packed.attention.shape[2:])
    attention = at_point(times, packed.inputs, packed.targets, samples.input_positions, samples.target_positions)
    inside = np.maximum(attention, 0).reshape(len(attention), -1, 2).sum(axis=2)
    shares = []
    for kind, (forward, backward) in enumerate(packed.linear[:, both]):
        known = (forward != ABSENT) & (backward != ABSENT) & (positions > 0)
        whole = (forward + backward)[known]
        least = float((whole / positions[known]).min(initial=np.inf))
        shares.append(charged[measure] * (least if np.isfinite(least) else 0.0) + inside[:, kind])
    return np.asarray(np.maximum(np.stack(shares, axis=1) - _ROUNDING_NS, 0))


def even_work_split(settings: PlannerSettings, works: Sequence[LeastWork]) -> tuple[int, ...]:
    """Layers per virtual stage; at least one on each."""
    *layers, head = layer_work(settings, works)
    layers[-1] += head
    return evenest(layers, settings.pipeline_parallel * settings.chunks)


def layer_work(settings: PlannerSettings, works: Sequence[LeastWork]) -> list[float]:
    """Least work of all batches on each layer, and on the head."""
    total = dict(zip(works[0].kinds, np.sum([work.total for work in works], axis=0).tolist(), strict=True))
    *modules, head = (total[kind] for kind in settings.layout.modules)
    counted = float(np.mean([work.counted for work in works]))
    modules[-1] *= counted
    return [*np.array(modules).reshape(-1, 1 if settings.layout.pattern else 2).sum(axis=1).tolist(), head * counted]
