"""A picture of a dataset: how long its samples are, which tasks there are, how much would be padding."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_dynapipe.data.meta import open_split
from megatron_dynapipe.data.stats import DatasetStatistics

_MOST_TASKS = 30


def draw_statistics(folder: Path, statistics: DatasetStatistics, path: Path) -> Path:
    """Draw a split's statistics, as PNG or SVG by the path's suffix; the path."""
    lengths = open_split(folder, statistics.split).lengths
    figure = Figure(figsize=(12, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    histogram, tasks, waste = figure.subplots(1, 3)
    _lengths(histogram, lengths.input, lengths.target)
    shown = sorted(statistics.tasks, key=lambda task: -task.share)[:_MOST_TASKS]
    rest = f", {_MOST_TASKS} of {len(statistics.tasks)}" if len(statistics.tasks) > _MOST_TASKS else ""
    _bars(tasks, f"share of what training draws, %{rest}", {task.task: 100 * task.share for task in shown})
    known = {name: 100 * share for name, share in statistics.padding_waste.items() if share is not None}
    _bars(waste, "padding of all positions, %", known)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _lengths(axis: Any, inputs: Any, targets: Any) -> None:
    longest = max(int(inputs.max()), int(targets.max()), 2)
    edges = np.unique(np.round(np.geomspace(1, longest + 1, 40)))
    for name, values in (("input", inputs), ("target", targets)):
        axis.hist(values, bins=edges, histtype="step", label=name)
    axis.set_xscale("log")
    axis.set_title("samples by tokens", loc="left", fontsize=10)
    axis.legend(frameon=False)


def _bars(axis: Any, title: str, values: dict[str, float]) -> None:
    names = list(values)
    axis.barh(range(len(names)), list(values.values()))
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
