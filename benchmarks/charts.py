"""The charts of the experiments: lines over sizes, and horizontal bars, in one hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "dynapipe": "#1f5fa6",
    "planned": "#1f5fa6",
    "published planner": "#6a3d9a",
    "packed_rows": "#2a9d6f",
    "token_based": "#e08a3c",
    "uniform": "#c2a03a",
    "packing": "#b5343c",
    "packing, same layout": "#d98a8f",
    "padding": "#8a8f96",
}
MARKERS = {"dynapipe": "o", "planned": "o", "packed_rows": "s", "token_based": "^", "packing": "D", "padding": "v"}
DASHED = ("packing, same layout", "published planner")
PUBLISHED = "published planner"

Series = Mapping[str, Sequence[float | None]]
"""By name, a value for each place on the horizontal axis; None where there is none."""


def canvas(rows: int, columns: int, *, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels."""
    figure = Figure(figsize=(width * columns, height * rows + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def lines(axis: Axes, places: Sequence[str], series: Series, *, title: str, x: str, y: str) -> None:
    """Every series as a line over evenly spaced places; the first one lies on top."""
    for depth, (name, values) in enumerate(series.items()):
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        axis.plot(
            [place for place, _ in known],
            [value for _, value in known],
            marker=MARKERS.get(name, "."),
            markersize=5,
            linewidth=1.6,
            linestyle="--" if name in DASHED else "-",
            color=COLOURS[name],
            label=name,
            zorder=20 - depth,
        )
    axis.set_xticks(range(len(places)), places)
    axis.set_xlim(-0.35, len(places) - 0.65)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(axis="y", color="#e4e6e8", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def bars(axis: Axes, values: Mapping[str, float | None], *, title: str, x: str, form: str, best: str = "") -> None:
    """A labelled horizontal bar for each name, the first one above."""
    most = max((value for value in values.values() if value is not None), default=1.0)
    for row, (name, value) in enumerate(values.items()):
        if value is None:
            axis.text(most * 0.01, row, "no plan", va="center", fontsize=9)
            continue
        axis.barh(row, value, height=0.7, color=COLOURS["dynapipe"] if name == best else "#b9c4d0")
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(value + most * 0.015, row, form.format(value), va="center", fontsize=9, bbox=clear)
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_xlim(0, most * 1.18)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.spines[["top", "right"]].set_visible(False)


def sweep(
    cells: Iterable[tuple[str, str, int, float | None]],
    *,
    x: str,
    y: str,
    rows: int = 1,
    name: Callable[[int], str] = str,
    width: float = 4.2,
    height: float = 3.2,
) -> tuple[Figure, dict[str, Axes]]:
    """Lines over places from cells (panel, series, place, value), panels and series in the order of the cells."""
    found: dict[str, dict[str, dict[int, float | None]]] = {}
    for panel, series, place, value in cells:
        found.setdefault(panel, {}).setdefault(series, {})[place] = value
    figure, axes = canvas(rows, len(found) // rows, width=width, height=height)
    panels = dict(zip(found, [axis for row in axes for axis in row], strict=True))
    for panel, axis in panels.items():
        places = sorted({place for values in found[panel].values() for place in values})
        series = {each: [values.get(place) for place in places] for each, values in found[panel].items()}
        lines(axis, [name(place) for place in places], series, title=panel, x=x, y=y)
    legend(figure, axes)
    return figure, panels


def legend(figure: Figure, panels: Sequence[Sequence[Axes]]) -> None:
    """One legend below all panels."""
    handles = {
        label: handle
        for row in panels
        for axis in row
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 7), frameon=False
    )


def save(figure: Figure, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
