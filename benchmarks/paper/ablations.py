"""What each part of the planner is worth: the same batches with one part replaced.

    python -m benchmarks.paper.ablations [--scale real]

simulated: GPT and T5 on 8 A100s at (data, tensor, pipeline) = (1, 2, 4), batches of 65,536 tokens of all maximum
lengths up to 4096. real: the demo's models, trained (`real.py`), without the orders.

Parts are replaced in planned, padded micro-batches with a chosen layer split:
    ordering   the order that micro-batches are cut from; only the schedule is searched then, as in the line "sorted"
    partition  micro-batches of a fixed number of padded tokens or of samples, list-scheduled
    schedule   1F1B or GPipe in place of a searched order; "no search" is list scheduling of the partition as it is
    recompute  one mode for all micro-batches in place of one chosen for each
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import msgspec
import numpy as np

from benchmarks import charts
from benchmarks.common import markdown, number, say
from benchmarks.paper import real
from benchmarks.paper.clusters import LAYERS, USUAL_SIZE, Case, global_batches
from benchmarks.paper.output import arguments, chart, write
from benchmarks.paper.simulate import Point, chosen_split
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import by_length, partition
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.core.scheduling import schedule_batch
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, Recompute
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.ways.rivals.settings import PartitionAlgorithm, PartitionSettings

LAYOUT = (1, 2, 4)
MAXIMUM_LENGTHS = (512, 1024, 2048, 4096)
Order = Callable[[Samples], IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The planner with one part replaced."""

    part: str
    change: Callable[[PlannerSettings], PlannerSettings] = lambda settings: settings
    order: Order | None = None


def _with(**changes: object) -> Callable[[PlannerSettings], PlannerSettings]:
    return lambda settings: msgspec.structs.replace(settings, **changes)


def _algorithm(name: str) -> Callable[[PlannerSettings], PlannerSettings]:
    return _with(partition=PartitionSettings(algorithm=PartitionAlgorithm(name)))


BASE = "planned, padded"
VARIANTS: Mapping[str, Variant] = {
    "planned, padded or packed": Variant(part="all", change=_with(micro_batch_layouts=tuple(BatchLayout))),
    BASE: Variant(part="all"),
    "equal layer split": Variant(part="split", change=_with(modules_per_stage=None)),
    "sorted": Variant(part="ordering", order=lambda samples: by_length(samples.inputs, samples.targets)),
    "as they arrive": Variant(part="ordering", order=lambda samples: np.arange(len(samples.inputs), dtype=np.int64)),
    "fixed tokens": Variant(part="partition", change=_algorithm("token_based")),
    "fixed samples": Variant(part="partition", change=_algorithm("uniform")),
    "no search": Variant(part="schedule", change=_with(schedule=ScheduleSettings(search_evaluations=0))),
    "1F1B": Variant(part="schedule", change=_with(schedule=ScheduleSettings(method="1f1b"))),
    "GPipe": Variant(part="schedule", change=_with(schedule=ScheduleSettings(method="gpipe"))),
    **{f"recompute {mode} for all": Variant(part="recompute", change=_with(recompute=(mode,))) for mode in Recompute},
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One variant on one model: over the batches for which it has a plan.

    Attributes:
        model: what is trained.
        part: what is replaced.
        variant: by what.
        relative: tokens/s over those of planned, padded micro-batches, geometric mean; None where it has no plan.
        least: of a single batch.
        batches: with a plan, of those compared.
    """

    model: str
    part: str
    variant: str
    relative: float | None
    least: float | None
    batches: tuple[int, int]


def main() -> None:
    args = arguments(__doc__).parse_args()
    if args.scale == "real":
        real.ablations(args.output)
        return
    rows = [row for family in LAYERS for row in compared(Case(family, 8))]
    draw(rows, chart(args.output, "ablations-simulated"), "predicted tokens/s, planned and padded = 1")
    write(args.output, "ablations-simulated", rows, table(rows))


def compared(case: Case) -> list[Row]:
    """Every variant on every batch."""
    times: dict[str, list[int | None]] = {name: [] for name in VARIANTS}
    for length in MAXIMUM_LENGTHS:
        batches = global_batches(case.family, length, USUAL_SIZE)
        point = Point(max_seq_len=length, tokens=USUAL_SIZE, batches=batches)
        padded = case.settings(LAYOUT, micro_batch_layouts=(BatchLayout.PADDED,))
        split = chosen_split(case, point, LAYOUT, padded)
        settings = padded if split is None else padded.with_layers_per_stage(split)
        for name, variant in VARIANTS.items():
            times[name] += [predicted_ns(variant, settings, case, batch) for batch in batches]
        say(f"{case.model}: {length}")
    return [row_of(case.model, name, times[name], times[BASE]) for name in VARIANTS]


def predicted_ns(variant: Variant, settings: PlannerSettings, case: Case, batch: GlobalBatch) -> int | None:
    """Predicted time of the batch; None where the variant has no plan."""
    try:
        planner = planner_of(variant.change(settings), case.costs)
        if variant.order is None:
            return planner.plan(batch, 0).totals.predicted_ns
        samples = planner.samples(batch)
        problem = planner.problem(samples)
        ordered = partition(problem, [variant.order(samples)], improve=False)
        found = schedule_batch(problem, ordered, planner.settings.schedule, searchable=True)
    except DynaPipeError:
        return None
    return None if found is None else found.makespan_ns


def row_of(model: str, name: str, times: Sequence[int | None], base: Sequence[int | None]) -> Row:
    """A variant's times against the base's."""
    ratios = [own / mine for mine, own in zip(times, base, strict=True) if mine is not None and own is not None]
    return Row(
        model=model,
        part=VARIANTS[name].part if name in VARIANTS else "",
        variant=name,
        relative=geometric_mean(ratios) if ratios else None,
        least=min(ratios, default=None),
        batches=(len(ratios), len(times)),
    )


def draw(rows: Sequence[Row], path: Path, x: str) -> None:
    """A panel for each model."""
    models = list(dict.fromkeys(row.model for row in rows))
    names = max(sum(row.model == model for row in rows) for model in models)
    figure, (axes,) = charts.canvas(1, len(models), width=6.2, height=0.6 + 0.3 * names)
    for model, axis in zip(models, axes, strict=True):
        values = {_label(row): row.relative for row in rows if row.model == model}
        charts.bars(axis, values, title=model, x=x, form="{:.2f}", best=BASE)
        axis.axvline(1, color="#33393f", linewidth=0.8, linestyle=":")
    charts.save(figure, path)


def _label(row: Row) -> str:
    return row.variant if row.part in ("all", "recompute", "split") else f"{row.part}: {row.variant}"


def table(rows: Sequence[Row]) -> str:
    """A line for every variant, a column for each model."""
    models = list(dict.fromkeys(row.model for row in rows))
    lines = []
    for part, variant in dict.fromkeys((row.part, row.variant) for row in rows):
        cells = [part, variant]
        for model in models:
            (row,) = [each for each in rows if (each.model, each.variant) == (model, variant)]
            few = "" if row.batches[0] == row.batches[1] else f", {row.batches[0]} of {row.batches[1]} batches"
            cells.append(f"{number(row.relative, '{:.3f}', 'no plan')} ({number(row.least, '{:.3f}')}{few})")
        lines.append(cells)
    return markdown(["part", "variant", *(f"{model}: mean (worst)" for model in models)], lines)


if __name__ == "__main__":
    main()
