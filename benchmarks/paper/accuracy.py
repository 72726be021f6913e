"""How well times and memory are predicted in training.

    python -m benchmarks.paper.accuracy [--minutes 8]

The demo's models on this machine: a profile, then planned iterations over two stages, predicted against measured
(`benchmarks/cost_accuracy`, which also has the errors on the published profiles of A100s).
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import charts
from benchmarks.common import markdown, number, run_quietly
from benchmarks.paper.output import arguments, chart, write


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one quantity.

    Attributes:
        model: what is trained.
        quantity: what is predicted.
        median: relative error.
        mean: error of time, None for memory.
        count: iterations, or stages.
        pairs: (predicted, measured) seconds of iterations, MB of stages.
    """

    model: str
    quantity: str
    median: float
    mean: float | None
    count: int
    pairs: list[tuple[float, float]] = []


def main() -> None:
    parser = arguments(__doc__, scales=("real",))
    parser.add_argument("--minutes", type=float, default=8.0, help="for the iterations of both models")
    args = parser.parse_args()
    rows = measured(args.minutes)
    draw_pairs(rows, chart(args.output, "accuracy-real"))
    write(args.output, "accuracy-real", rows, table(rows))


def measured(minutes: float) -> list[Row]:
    """What `cost_accuracy` finds on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.cost_accuracy.run", "--output", folder, "--minutes", minutes]
        run_quietly(command, timeout_s=60 * (2 * minutes + 10))
        figures = json.loads((Path(folder) / "figures.json").read_text())
    return [row for model in ("t5", "gpt") if model in figures for row in of_machine(model, figures[model])]


def of_machine(model: str, figures: Mapping[str, Any]) -> list[Row]:
    """Rows of one model: time of iterations, memory of the stages."""
    iterations, memory = figures["as profiled"], figures["memory"]
    predicted = [a + m for a, m in zip(memory["activations_mb"], memory["messages_mb"], strict=True)]
    pairs = list(zip(predicted, memory["counted_mb"], strict=True))
    errors = sorted(abs(error) for error in memory["error_of_both"])
    return [
        Row(
            model=f"demo {model}",
            quantity="iteration, as profiled",
            median=iterations["median_error"],
            mean=iterations["mean_error"],
            count=iterations["iterations"],
            pairs=iterations.get("pairs", []),
        ),
        Row(
            model=f"demo {model}",
            quantity="peak memory of a stage",
            median=errors[len(errors) // 2],
            mean=None,
            count=len(errors),
            pairs=pairs,
        ),
    ]


def draw_pairs(rows: Sequence[Row], path: Path) -> None:
    """Predicted over measured time of iterations; the line is agreement."""
    models = list(dict.fromkeys(row.model for row in rows))
    figure, (axes,) = charts.canvas(1, len(models), width=5.0, height=4.2)
    for model, axis in zip(models, axes, strict=True):
        own = [row for row in rows if row.model == model and row.quantity.startswith("iteration") and row.pairs]
        values = [value for row in own for pair in row.pairs for value in pair] or [1.0]
        ends = (min(values) * 0.95, max(values) * 1.05)
        axis.plot(ends, ends, color="#33393f", linewidth=0.8, linestyle=":")
        for row, colour in zip(own, ("#b9a06a", charts.COLOURS["dynapipe"]), strict=False):
            label = f"{row.quantity.partition(', ')[2]}: median error {row.median:.1%}"
            axis.plot(*zip(*[(m, p) for p, m in row.pairs], strict=True), "o", color=colour, markersize=4, label=label)
        axis.set(xlim=ends, ylim=ends, xlabel="measured, s", ylabel="predicted, s")
        axis.set_title(f"{model}: iterations over two stages", fontsize=10)
        axis.legend(fontsize=8, frameon=False, loc="upper left")
        axis.spines[["top", "right"]].set_visible(False)
    charts.save(figure, path)


def table(rows: Sequence[Row]) -> str:
    """A line for every quantity."""
    lines = [[row.model, row.quantity, f"{row.median:.1%}", number(row.mean, "{:.1%}"), str(row.count)] for row in rows]
    return markdown(["model", "predicted", "median error", "mean error", "of"], lines)


if __name__ == "__main__":
    main()
