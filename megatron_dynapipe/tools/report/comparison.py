"""Methods compared over several batches: geometric means, and a chart of them.

         tokens/s                      padding efficiency
dynapipe ▇▇▇▇▇▇▇▇▇▇▇▇ 24,000           ▇▇▇▇▇▇▇▇▇▇▇ 99%
packing  ▇▇▇▇▇ 11,000 (÷ 2.2)          ▇▇▇▇▇▇▇▇▇ 80%          a dot is one batch
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "dynapipe"
COLOUR, OTHERS, DOT = "#4878a8", "#b9c4d0", "#33393f"

Entries = Sequence[dict[str, Any]]
"""Batches: `{"id": …, "methods": {NAME: {"error": None, "tokens_per_second": …, "padding_efficiency": …}}}`."""


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers, at least one."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def geometric_means(entries: Entries) -> dict[str, dict[str, dict[str, float]]]:
    """For every method, its tokens/s over every other's: the geometric mean over the batches that both can run."""
    methods = list(entries[0]["methods"]) if entries else []
    over: dict[str, dict[str, dict[str, float]]] = {method: {"geomean_over": {}} for method in methods}
    for method in methods:
        for other in methods:
            pairs = [(entry["methods"][method], entry["methods"][other]) for entry in entries]
            ratios = [
                ours["tokens_per_second"] / its["tokens_per_second"]
                for ours, its in pairs
                if not (ours["error"] or its["error"])
            ]
            if other != method and ratios:
                over[method]["geomean_over"][other] = geometric_mean(ratios)
    return over


def draw_comparison(entries: Entries, path: Path) -> Path:
    """Draw every method's tokens/s and padding efficiency as bars, and each batch as a dot: PNG or SVG by the suffix.

    Raises:
        ConfigError: as `outputs.write_file`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron_dynapipe.report.timeline import save

    rows_of = {
        method: [entry["methods"][method] for entry in entries if entry["methods"][method]["error"] is None]
        for method in entries[0]["methods"]
    }
    over = geometric_means(entries).get(OURS, {"geomean_over": {}})["geomean_over"]

    def _note(method: str) -> str:
        ratio = f" (× {over[method]:.2f})" if method in over else ""
        few = len(rows_of[method])
        return ratio + (f", {few} of {len(entries)} batches" if few < len(entries) else "")

    figure = Figure(figsize=(11.0, 1.3 + 0.42 * len(rows_of)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    speeds = {method: [row["tokens_per_second"] for row in rows] for method, rows in rows_of.items()}
    _bars(left, speeds, lambda method, mean: f"{mean:,.0f}{_note(method)}", room=1.45)
    left.set_xlabel("tokens/s, predicted")
    shares = {method: [row["padding_efficiency"] * 100 for row in rows] for method, rows in rows_of.items()}
    _bars(right, shares, lambda _, mean: f"{mean:.1f}%", room=1.2)
    right.set_xlabel("padding efficiency, %")
    figure.suptitle(
        f"geometric means of {len(entries)} batches; a dot is one batch; × : {OURS}'s tokens/s over the method's",
        fontsize=10,
    )
    return save(figure, path)


def _bars(axis: "Axes", values: dict[str, list[float]], label: Any, *, room: float) -> None:
    """A bar for every method, labelled; `room` is how far the axis goes beyond the longest."""
    names = list(values)
    most = max((value for numbers in values.values() for value in numbers), default=1.0)
    axis.set_xlim(0, most * room)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_yticks(range(len(names)), names)
    axis.spines[["top", "right"]].set_visible(False)
    for row, (name, numbers) in enumerate(values.items()):
        if not numbers:
            axis.text(most * 0.01, row, "no plan", va="center", fontsize=9, color=DOT)
            continue
        mean = geometric_mean(numbers)
        axis.barh(row, mean, height=0.7, color=COLOUR if name == OURS else OTHERS)
        axis.plot(numbers, [row] * len(numbers), ".", color=DOT, markersize=4, alpha=0.6)
        axis.text(max(numbers) + most * 0.015, row, label(name, mean), va="center", fontsize=9)
