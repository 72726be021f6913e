"""Throughput over the maximum length of samples, or over the size of global batches (the paper's main experiments).

    python benchmarks/paper/throughput.py --over length [--scale real]
    python benchmarks/paper/throughput.py --over batch [--scale real]

simulated: GPT and T5 on 8, 16 and 32 A100s, each method on its best layout (`simulate.py`), tokens/s as predicted.
real: the demo's models on the devices at hand, trained (`real.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import charts
from clusters import LAYERS, LENGTHS, SIZES, USUAL_LENGTH, USUAL_SIZE, Case, global_batches, published_best
from output import PAPER, arguments, markdown, number, write
from simulate import METHODS, SAME_LAYOUT, Point, Row, best_rows

PUBLISHED = "published planner"
SHOWN = (*METHODS[:4], SAME_LAYOUT, *METHODS[4:])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--over", choices=("length", "batch"), required=True)
    parser.add_argument("--gpus", default="8,16,32", help="of the simulated clusters (%(default)s)")
    parser.add_argument("--places", default="", help="real: only these lengths, or numbers of samples")
    args = parser.parse_args()
    if args.scale == "real":
        import real

        real.throughput(args.over, args.output, [int(place) for place in args.places.split(",") if place])
        return
    clusters = [int(gpus) for gpus in args.gpus.split(",")]
    rows = [row for family in LAYERS for gpus in clusters for row in swept(Case(family, gpus), args.over)]
    name = f"throughput-{args.over}-simulated"
    draw(rows, args.over, args.output / f"{name}.png")
    write(args.output, name, rows, table(rows, args.over), paper=PAPER)


def swept(case: Case, over: str) -> list[Row]:
    """The rows of one model on one cluster."""
    places = [(length, USUAL_SIZE) for length in LENGTHS] if over == "length" else [(USUAL_LENGTH, n) for n in SIZES]
    rows = []
    for length, tokens in places:
        batches = global_batches(case.family, length, tokens)
        rows += best_rows(case, Point(max_seq_len=length, tokens=tokens, batches=batches))
        published = published_best(case.family, length) if over == "length" and case.gpus == 8 else None
        if published is not None:
            own = {"model": case.model, "gpus": case.gpus, "max_seq_len": length, "tokens": tokens}
            speed, layout = published.tokens_per_second, published.layout
            rows.append(Row(**own, method=PUBLISHED, layout=layout, tokens_per_second=speed))
    return rows


def place_of(over: str) -> Callable[[Row], int]:
    """What varies."""
    return (lambda row: row.max_seq_len) if over == "length" else (lambda row: row.tokens)


def draw(rows: Sequence[Row], over: str, path: Path) -> None:
    """A panel for every model and cluster: tokens/s of every method."""
    place = place_of(over)
    panels = sorted({(row.model.partition(",")[0], row.gpus, row.model) for row in rows})
    kinds = sorted({kind for kind, _, _ in panels})
    figure, axes = charts.canvas(len(kinds), len(panels) // len(kinds))
    for (_, gpus, model), axis in zip(panels, [axis for row in axes for axis in row], strict=True):
        own = [row for row in rows if (row.model, row.gpus) == (model, gpus)]
        places = sorted({place(row) for row in own})
        series = {
            method: [_speed(own, place, at, method) for at in places]
            for method in (*SHOWN, PUBLISHED)
            if any(row.method == method for row in own)
        }
        x = "maximum length, tokens" if over == "length" else "global batch, tokens"
        charts.lines(axis, [_short(at) for at in places], series, title=f"{model} on {gpus} GPUs", x=x, y="k tokens/s")
        for at, speed in enumerate(series["dynapipe"]):
            other = series["packing"][at]
            if speed is not None and other is not None:
                axis.annotate(
                    f"× {speed / other:.2f}", (at, speed), (0, 6), textcoords="offset points", ha="center", fontsize=8
                )
        axis.set_ylim(0, 1.12 * max(speed for speeds in series.values() for speed in speeds if speed is not None))
    figure.suptitle("predicted throughput, each method on its best layout; ×: dynapipe over packing", fontsize=11)
    charts.legend(figure, axes)
    charts.save(figure, path)


def _speed(rows: Sequence[Row], place: Callable[[Row], int], at: int, method: str) -> float | None:
    (speed,) = [row.tokens_per_second for row in rows if place(row) == at and row.method == method] or [None]
    return None if speed is None else speed / 1e3


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 16_384 else str(tokens)


def table(rows: Sequence[Row], over: str) -> str:
    """A line for every model, cluster and place: tokens/s and layout of every method, and the planner's gain."""
    place = place_of(over)
    shown = [method for method in (*SHOWN, PUBLISHED) if any(row.method == method for row in rows)]
    columns = ["model", "GPUs", "maximum length" if over == "length" else "global batch, tokens", *shown]
    columns += ["× packing", "× packed_rows", "× token_based"]
    lines = []
    for model, gpus, at in dict.fromkeys((row.model, row.gpus, place(row)) for row in rows):
        own = {row.method: row for row in rows if (row.model, row.gpus, place(row)) == (model, gpus, at)}
        cells = [model, str(gpus), f"{at:,}", *(_cell(own.get(method)) for method in shown)]
        for other in ("packing", "packed_rows", "token_based"):
            pair = own["dynapipe"].tokens_per_second, own[other].tokens_per_second
            cells.append(f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else "–")
        lines.append(cells)
    return markdown(columns, lines)


def _cell(row: Row | None) -> str:
    if row is None or row.tokens_per_second is None:
        return "–" if row is None else "no plan"
    layout = f" ({','.join(map(str, row.layout))})" if row.layout and row.method != SAME_LAYOUT else ""
    return number(row.tokens_per_second) + layout


if __name__ == "__main__":
    main()
