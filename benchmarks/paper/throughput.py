"""Throughput over the maximum length of samples, or over the size of global batches (the paper's main experiments).

    python -m benchmarks.paper.throughput --over length [--scale real]
    python -m benchmarks.paper.throughput --over batch [--scale real]

simulated: GPT and T5 on 8, 16 and 32 A100s, each method on its best layout (`simulate.py`), tokens/s as predicted.
real: the demo's models on the devices at hand, trained (`real.py`). Over the maximum length also what share of the
positions that were run is not padding, simulated on 8 A100s.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import charts
from benchmarks.common import markdown, number
from benchmarks.paper import real
from benchmarks.paper.clusters import (
    LAYERS,
    LENGTHS,
    SIZES,
    USUAL_LENGTH,
    USUAL_SIZE,
    Case,
    global_batches,
    published_best,
)
from benchmarks.paper.output import PAPER, arguments, chart, write
from benchmarks.paper.simulate import METHODS, SAME_LAYOUT, Point, Row, best_rows

SHOWN = (*METHODS[:4], SAME_LAYOUT, *METHODS[4:], charts.PUBLISHED)


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Real tokens over the positions that a method runs; None where it has no plan."""

    model: str
    max_seq_len: int
    method: str
    padding_efficiency: float | None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--over", choices=("length", "batch"), required=True)
    parser.add_argument("--gpus", default="8,16,32", help="of the simulated clusters (%(default)s)")
    parser.add_argument("--places", default="", help="real: only these lengths, or numbers of samples")
    args = parser.parse_args()
    name, shares = f"throughput-{args.over}-{args.scale}", []
    rows: Sequence[Any]
    if args.scale == "real":
        rows = real.throughput(args.over, [int(place) for place in args.places.split(",") if place])
        draw_real(rows, args.over, chart(args.output, name))
        shown = real.throughput_table(rows, args.over)
        shares = [share_of(f"demo {row['model']}", row["place"], row) for row in rows]
    else:
        clusters = [int(gpus) for gpus in args.gpus.split(",")]
        rows = [row for family in LAYERS for gpus in clusters for row in swept(Case(family, gpus), args.over)]
        draw(rows, args.over, chart(args.output, name))
        shown = table(rows, args.over)
        alike = [row for row in rows if row.gpus == 8 and row.method != SAME_LAYOUT]
        shares = [share_of(row.model, row.max_seq_len, msgspec.structs.asdict(row)) for row in alike]
    write(args.output, name, rows, shown, paper=PAPER)
    if args.over == "length":
        draw_shares(shares, chart(args.output, f"padding-{args.scale}"))
        write(args.output, f"padding-{args.scale}", shares, table_of_shares(shares))


def swept(case: Case, over: str) -> list[Row]:
    """The rows of one model on one cluster."""
    places = [(length, USUAL_SIZE) for length in LENGTHS] if over == "length" else [(USUAL_LENGTH, n) for n in SIZES]
    rows = []
    for length, tokens in places:
        batches = global_batches(case.family, length, tokens)
        rows += best_rows(case, Point(max_seq_len=length, tokens=tokens, batches=batches))
        published = published_best(case.family, length) if over == "length" and case.gpus == 8 else None
        if published is not None:
            rows.append(
                Row(
                    model=case.model,
                    gpus=case.gpus,
                    max_seq_len=length,
                    tokens=tokens,
                    method=charts.PUBLISHED,
                    layout=published.layout,
                    tokens_per_second=published.tokens_per_second,
                    padding_efficiency=published.padding_efficiency,
                )
            )
    return rows


def place_of(over: str) -> Callable[[Row], int]:
    """What varies."""
    return (lambda row: row.max_seq_len) if over == "length" else (lambda row: row.tokens)


def draw(rows: Sequence[Row], over: str, path: Path) -> None:
    """A panel for every model and cluster: tokens/s of every method."""
    place = place_of(over)
    ordered = sorted(rows, key=lambda row: (row.model.partition(",")[0], row.gpus, SHOWN.index(row.method)))
    speeds = [row.tokens_per_second and row.tokens_per_second / 1e3 for row in ordered]
    cells = [(_panel(row), row.method, place(row), speed) for row, speed in zip(ordered, speeds, strict=True)]
    x = "maximum length, tokens" if over == "length" else "global batch, tokens"
    kinds = len({row.model.partition(",")[0] for row in rows})
    figure, panels = charts.sweep(cells, x=x, y="k tokens/s", rows=kinds, name=_short)
    for panel, axis in panels.items():
        own = {(method, at): speed for of, method, at, speed in cells if of == panel}
        for number_of, at in enumerate(sorted({at for _, at in own})):
            speed, other = own["dynapipe", at], own["packing", at]
            if speed is not None and other is not None:
                where = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
                axis.annotate(f"× {speed / other:.2f}", (number_of, speed), (0, 6), **where)
        axis.set_ylim(0, 1.12 * max(speed for speed in own.values() if speed is not None))
    figure.suptitle("predicted throughput, each method on its best layout; ×: dynapipe over packing", fontsize=11)
    charts.save(figure, path)


def draw_real(rows: Sequence[Mapping[str, Any]], over: str, path: Path) -> None:
    """A panel for each model: measured tokens/s."""
    cells = [
        (f"demo {row['model']}, two stages", row["method"], row["place"], row["tokens_per_second"] / 1e3)
        for row in rows
    ]
    x = "maximum length, tokens" if over == "length" else "global batch, samples"
    charts.save(charts.sweep(cells, x=x, y="k tokens/s, measured", width=5.4, height=3.6)[0], path)


def _panel(row: Row) -> str:
    return f"{row.model} on {row.gpus} GPUs"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 16_384 else str(tokens)


def table(rows: Sequence[Row], over: str) -> str:
    """A line for every model, cluster and place: tokens/s and layout of every method, and the planner's gain."""
    place = place_of(over)
    shown = [method for method in SHOWN if any(row.method == method for row in rows)]
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


def share_of(model: str, length: int, row: Mapping[str, Any]) -> Share:
    return Share(model=model, max_seq_len=length, method=row["method"], padding_efficiency=row["padding_efficiency"])


def draw_shares(shares: Sequence[Share], path: Path) -> None:
    """A panel for each model: padding efficiency of every method."""
    cells = [(row.model, row.method, row.max_seq_len, _percent(row)) for row in shares]
    figure, panels = charts.sweep(cells, x="maximum length, tokens", y="padding efficiency, %", width=5.6, height=3.6)
    for axis in panels.values():
        axis.set_ylim(0, 105)
    charts.save(figure, path)


def table_of_shares(shares: Sequence[Share]) -> str:
    """A line for every model and maximum length."""
    methods = list(dict.fromkeys(row.method for row in shares))
    found = {(row.model, row.max_seq_len, row.method): _percent(row) for row in shares}
    lines = [
        [model, f"{at:,}", *(number(found.get((model, at, method)), "{:.1f}%") for method in methods)]
        for model, at in dict.fromkeys((row.model, row.max_seq_len) for row in shares)
    ]
    return markdown(["model", "maximum length", *methods], lines)


def _percent(row: Share) -> float | None:
    return None if row.padding_efficiency is None else 100 * row.padding_efficiency


if __name__ == "__main__":
    main()
