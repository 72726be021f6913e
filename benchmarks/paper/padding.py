"""Padding efficiency over the maximum length: real tokens over the positions that a method runs.

    python benchmarks/paper/padding.py [--scale real]

simulated: the micro-batches of each method on 8 A100s, on its layout of most tokens/s; the published planner's as on
record. real: those that `throughput.py --over length --scale real` trained, from its file.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import charts
from clusters import LAYERS, LENGTHS, USUAL_SIZE, Case, global_batches, published_best
from output import arguments, markdown, number, write
from simulate import METHODS, Point, Row, best_row

PUBLISHED = "published planner"


def main() -> None:
    args = arguments(__doc__).parse_args()
    name = f"padding-{args.scale}"
    rows = simulated() if args.scale == "simulated" else trained(args.output / "throughput-length-real.json")
    draw(rows, args.output / f"{name}.png")
    write(args.output, name, rows, table(rows))


def simulated() -> list[Row]:
    """Every method on its best layout of 8 GPUs."""
    rows = []
    for family in LAYERS:
        case = Case(family, 8)
        for length in LENGTHS:
            batches = global_batches(family, length, USUAL_SIZE)
            point = Point(max_seq_len=length, tokens=USUAL_SIZE, batches=batches)
            rows += [best_row(case, point, method) for method in METHODS]
            if (found := published_best(family, length)) is not None:
                own = {"model": case.model, "gpus": 8, "max_seq_len": length, "tokens": USUAL_SIZE}
                rows.append(Row(**own, method=PUBLISHED, padding_efficiency=found.padding_efficiency))
    return rows


def trained(path: Path) -> list[Row]:
    """What training ran."""
    if not path.exists():
        raise SystemExit(f"expected {path}: run `benchmarks/paper/throughput.py --over length --scale real` first")
    return [
        Row(
            model=row["model"],
            gpus=0,
            max_seq_len=row["place"],
            tokens=0,
            method=row["method"],
            padding_efficiency=row["padding_efficiency"],
        )
        for row in json.loads(path.read_text())["rows"]
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each model."""
    models = list(dict.fromkeys(row.model for row in rows))
    figure, ((axes),) = charts.canvas(1, len(models), width=5.6, height=3.6)
    for model, axis in zip(models, axes, strict=True):
        own = [row for row in rows if row.model == model]
        places = sorted({row.max_seq_len for row in own})
        series = {method: [_share(own, at, method) for at in places] for method in _methods(own)}
        names = [str(place) for place in places]
        charts.lines(axis, names, series, title=model, x="maximum length, tokens", y="padding efficiency, %")
        axis.set_ylim(0, 105)
    charts.legend(figure, [axes])
    charts.save(figure, path)


def table(rows: Sequence[Row]) -> str:
    """A line for every model and maximum length."""
    methods = _methods(rows)
    lines = []
    for model, length in dict.fromkeys((row.model, row.max_seq_len) for row in rows):
        own = [row for row in rows if row.model == model]
        shares = [number(_share(own, length, method), "{:.1f}%") for method in methods]
        lines.append([model, f"{length:,}", *shares])
    return markdown(["model", "maximum length", *methods], lines)


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.method for row in rows))


def _share(rows: Sequence[Row], length: int, method: str) -> float | None:
    found = [row.padding_efficiency for row in rows if (row.max_seq_len, row.method) == (length, method)]
    return found[0] * 100 if found and found[0] is not None else None


if __name__ == "__main__":
    main()
