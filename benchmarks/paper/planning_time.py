"""How long planning takes, against the iteration that is planned (the paper plans on the trainers' idle CPUs).

    python -m benchmarks.paper.planning_time

8 A100s at (1, 1, 8) and (1, 2, 4), over the maximum length and over the size of global batches; processor time of one
core, the median of three plans of each batch; the published planner's as on record, on another machine. "cores" are
those that keep up with training: planning over predicted time of the iteration. What planning takes where the demo's
models train is a column of `benchmarks/throughput`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import charts
from benchmarks.common import markdown, number, say
from benchmarks.paper.clusters import (
    LAYERS,
    LENGTHS,
    USUAL_LENGTH,
    USUAL_SIZE,
    Case,
    Layout,
    global_batches,
    published_on,
)
from benchmarks.paper.output import arguments, chart, write
from megatron_dynapipe.errors import DynaPipeError
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.sampling import GlobalBatch

LAYOUTS: tuple[Layout, ...] = ((1, 1, 8), (1, 2, 4))
TOKENS = (16_384, 32_768, 65_536, 131_072, 262_144)
REPEATS = 3


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Planning of one kind of batch: means over its batches.

    Attributes:
        model: what is trained, and its layout.
        max_seq_len: maximum length of a sample in tokens.
        tokens: of a global batch.
        planning_seconds: processor time of a plan; None where there is none.
        iteration_seconds: predicted time of the planned iteration.
        published_seconds: the published planner's, as on record.
    """

    model: str
    max_seq_len: int
    tokens: int
    planning_seconds: float | None
    iteration_seconds: float | None
    published_seconds: float | None = None


def main() -> None:
    args = arguments(__doc__, scales=("simulated",)).parse_args()
    rows = simulated()
    draw(rows, chart(args.output, "planning-time-simulated"))
    write(args.output, "planning-time-simulated", rows, table(rows))


def simulated() -> list[Row]:
    """Both models on both layouts, over lengths and sizes."""
    rows = []
    for family in LAYERS:
        for layout in LAYOUTS:
            case = Case(family, 8)
            planner = Planner(case.settings(layout), case.costs)
            places = [(n, USUAL_SIZE) for n in LENGTHS] + [(USUAL_LENGTH, n) for n in TOKENS if n != USUAL_SIZE]
            for length, tokens in places:
                batches = global_batches(family, length, tokens)
                seconds, iteration = timed(planner, batches)
                published = published_on(family, length, layout) if tokens == USUAL_SIZE else None
                rows.append(
                    Row(
                        model=f"{case.model} at {','.join(map(str, layout))}",
                        max_seq_len=length,
                        tokens=tokens,
                        planning_seconds=seconds,
                        iteration_seconds=iteration,
                        published_seconds=published and published.planning_seconds,
                    )
                )
                say(f"{rows[-1].model}: {length}, {tokens}")
    return rows


def timed(planner: Planner, batches: Sequence[GlobalBatch]) -> tuple[float | None, float | None]:
    """Processor seconds of a plan, and predicted seconds of its iteration: means over the batches."""
    seconds, iterations = [], []
    for batch in batches:
        taken = []
        for _ in range(REPEATS):
            start = time.process_time()
            try:
                plan = planner.plan(batch, 0)
            except DynaPipeError:
                return None, None
            taken.append(time.process_time() - start)
        seconds.append(statistics.median(taken))
        iterations.append(plan.totals.predicted_ns / 1e9)
    return statistics.mean(seconds), statistics.mean(iterations)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Planning time over the maximum length, over the size, and as a share of the iteration."""
    figure, (axes,) = charts.canvas(1, 3, width=4.4, height=3.8)
    by_size = sorted((row for row in rows if row.max_seq_len == USUAL_LENGTH), key=lambda row: row.tokens)
    models = list(dict.fromkeys(row.model for row in rows))

    def of_models(every: Sequence[Row], value: Callable[[Row], float | None]) -> dict[str, list[float | None]]:
        return {model: [value(row) for row in every if row.model == model] for model in models}

    by_length = [row for row in rows if row.tokens == USUAL_SIZE]
    seconds = of_models(by_length, lambda row: row.planning_seconds)
    published = of_models(by_length, lambda row: row.published_seconds)
    seconds |= {f"published planner, {model}": values for model, values in published.items()}
    title = "65,536 tokens; dashed: published planner"
    charts.lines(axes[0], [*map(str, LENGTHS)], seconds, title=title, x="maximum length, tokens", y="seconds a plan")
    axes[0].set_ylim(0.01, 20)
    axes[0].set_yscale("log")
    sizes = [f"{tokens // 1024}k" for tokens in TOKENS]
    planning = of_models(by_size, lambda row: row.planning_seconds)
    charts.lines(axes[1], sizes, planning, title="maximum length 2048", x="global batch, tokens", y="seconds a plan")
    shares = of_models(
        by_size,
        lambda row: 100 * (row.planning_seconds or 0) / row.iteration_seconds if row.iteration_seconds else None,
    )
    title = "planning over iteration, maximum length 2048"
    charts.lines(axes[2], sizes, shares, title=title, x="global batch, tokens", y="% of the iteration, one core")
    charts.legend(figure, [axes], width=2.8)
    charts.save(figure, path)


def table(rows: Sequence[Row]) -> str:
    """A line for every kind of batch."""
    columns = ["model", "maximum length", "global batch, tokens", "plan, s", "iteration, s", "cores"]
    columns.append("published planner, s")
    lines = []
    for row in rows:
        cores = None if row.planning_seconds is None else row.planning_seconds / (row.iteration_seconds or 1)
        lines.append(
            [
                row.model,
                f"{row.max_seq_len:,}",
                f"{row.tokens:,}",
                number(row.planning_seconds, "{:.3f}", "no plan"),
                number(row.iteration_seconds, "{:.2f}"),
                number(cores, "{:.3f}"),
                number(row.published_seconds, "{:.1f}"),
            ]
        )
    return markdown(columns, lines)


if __name__ == "__main__":
    main()
