"""Every method on every parallel layout of a cluster, as predicted; of each method the best layout.

Baselines run as they are trained: 1F1B, layers split equally. The planner's own layer split is chosen, for the two best
of its layouts under an equal split, from batches that are not among those compared. "packing,
same layout" is the paper's second baseline: packing on the layout that is best for the planner.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import msgspec

from benchmarks.common import say
from benchmarks.paper.clusters import Case, Layout, cut_batches, longest
from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.rivals.methods import Prediction, predict

METHODS = ("dynapipe", "packed_rows", "token_based", "packing", "padding")
SAME_LAYOUT = "packing, same layout"
SPLITS_CHOSEN = 2
"""Layouts for which the planner's layer split is chosen."""
FIRST_OTHER_BATCH = 4
"""Batches before it are compared, those from it on choose the layer split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place on the charts' horizontal axes."""

    max_seq_len: int
    tokens: int
    batches: Sequence[GlobalBatch]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one point: geometric means over the batches, on its best layout.

    Attributes:
        model: what is trained.
        gpus: of the cluster.
        max_seq_len: maximum length of a sample in tokens.
        tokens: of a global batch.
        method: a name of `METHODS`, or `SAME_LAYOUT`.
        layout: data, tensor and pipeline parallelism; None where no layout has a plan for every batch.
        layers_per_stage: the planner's chosen split; None: equal.
        tokens_per_second: real tokens, predicted.
        padding_efficiency: real tokens over positions.
        peak_memory_mb: of the fullest stage.
        micro_batches: of a global batch.
    """

    model: str
    gpus: int
    max_seq_len: int
    tokens: int
    method: str
    layout: Layout | None = None
    layers_per_stage: tuple[int | float, ...] | None = None
    tokens_per_second: float | None = None
    padding_efficiency: float | None = None
    peak_memory_mb: float | None = None
    micro_batches: float | None = None


def best_rows(case: Case, point: Point, methods: Sequence[str] = METHODS) -> list[Row]:
    """A row for every method, and packing on the planner's layout."""
    rows = [best_row(case, point, method) for method in methods]
    layout = rows[0].layout
    if "packing" in methods and layout is not None:
        rows.append(msgspec.structs.replace(_row(case, point, "packing", layout, None), method=SAME_LAYOUT))
    return rows


def best_row(case: Case, point: Point, method: str) -> Row:
    """The method on the layout of most tokens/s."""
    start = time.monotonic()
    found = [_row(case, point, method, layout, None) for layout in case.layouts()]
    if method == "dynapipe":
        found.sort(key=_speed, reverse=True)
        staged = [row.layout for row in found[:SPLITS_CHOSEN] if row.layout is not None and row.layout[2] > 1]
        found += [_row(case, point, method, layout, chosen_split(case, point, layout)) for layout in staged]
    best = max(found, key=_speed)
    say(
        f"{case.model} on {case.gpus}, {point.max_seq_len}, {point.tokens}: {method} {best.layout} {_speed(best):,.0f}"
        f" tokens/s ({time.monotonic() - start:.0f} s)"
    )
    return best


def chosen_split(
    case: Case, point: Point, layout: Layout, settings: PlannerSettings | None = None
) -> tuple[int, ...] | None:
    """The layer split that is predicted to be fastest for other batches; None where there is no plan for them."""
    others = cut_batches(case.family, point.max_seq_len, point.tokens, count=3, skip=FIRST_OTHER_BATCH)
    try:
        return choose_layer_split(settings or case.settings(layout), case.costs, others, to_fit=point.batches)
    except DynaPipeError:
        return None


def _row(case: Case, point: Point, method: str, layout: Layout, split: tuple[int, ...] | None) -> Row:
    row = Row(model=case.model, gpus=case.gpus, max_seq_len=point.max_seq_len, tokens=point.tokens, method=method)
    try:
        found = list(_predictions(case, point, method, layout, split))
    except DynaPipeError:
        return row
    return msgspec.structs.replace(
        row,
        layout=layout,
        layers_per_stage=split,
        tokens_per_second=geometric_mean(each.tokens_per_second for each in found),
        padding_efficiency=geometric_mean(each.padding_efficiency for each in found),
        peak_memory_mb=max(each.peak_memory_mb for each in found),
        micro_batches=geometric_mean(each.micro_batches for each in found),
    )


def _predictions(
    case: Case, point: Point, method: str, layout: Layout, split: tuple[int, ...] | None
) -> Iterator[Prediction]:
    """Planned, or by 1F1B over an equal split."""
    if method == "dynapipe":
        settings = case.settings(layout)
        settings = settings if split is None else settings.with_layers_per_stage(split)
    else:
        settings = case.settings(layout, schedule=ScheduleSettings(method="1f1b"))
    for batch in point.batches:
        longest_pair = longest(case.family, point.max_seq_len)
        yield predict(method, batch, longest_pair, settings, case.costs)


def _speed(row: Row) -> float:
    return row.tokens_per_second or 0.0
