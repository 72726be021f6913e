"""The throughput benchmark's figures: a row for each method, as JSON, Markdown and a chart."""

import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from methods import METHODS, STOCK

sys.path.append(str(Path(__file__).resolve().parents[1] / "paper"))

import charts

Results = dict[int, dict[str, Any]]
"""A method's answers by turn."""
SAME_LOSS = 1e-4
"""Relative distance within which the first losses of methods lie that train the same function."""


def figures(
    model: str,
    method: str,
    layout: str,
    split: list[int] | None,
    results: Results,
    base: Results,
    against: str = "planned",
) -> dict[str, Any]:
    """One method's row, over the turns that it took; turn 0 is the warm-up, which gives the first loss.

    `base` are the results of the method `against`, to which the ratio is.
    """
    turns = sorted(results.keys() & base.keys() - {0})
    timed = [results[turn] for turn in turns]
    tokens = sum(each["real_tokens"] for each in timed)
    pairs = [  # the base's time for as many tokens
        (other["ms"] * mine["real_tokens"] / other["real_tokens"], mine["ms"])
        for mine, other in zip(timed, [base[turn] for turn in turns], strict=True)
    ]
    errors = [abs(each["predicted_ms"] / each["ms"] - 1) for each in timed if each["predicted_ms"] is not None]
    idle = [share for each in timed for share in each["idle"]]
    return {
        "model": model,
        "method": method,
        "layout": layout,
        "layers_per_stage": split,
        "tokens_per_second": tokens / sum(each["ms"] for each in timed) * 1e3,
        "against": against,
        "ratio": interval(pairs),
        "padding_efficiency": min(tokens / sum(each["positions"] for each in timed), 1.0),
        "peak_memory_mb": max(each["peak_mb"] for each in timed),
        "idle": statistics.mean(idle) if idle else None,
        "micro_batches": statistics.mean(each["micro_batches"] for each in timed),
        "prediction_error": statistics.median(errors) if errors else None,
        "first_loss": results[0]["loss"],
    }


def interval(pairs: list[tuple[float, float]], draws: int = 2000) -> list[float]:
    """[low, value, high] of the ratio of sums of (base's ms, method's ms), resampled in pairs."""
    draw = random.Random(7)

    def ratio(some: list[tuple[float, float]]) -> float:
        return sum(one for one, _ in some) / sum(other for _, other in some)

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(draws))
    return [drawn[draws * 25 // 1000], ratio(pairs), drawn[draws * 975 // 1000 - 1]]


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        f"| model | method | tokens/s | ratio to {rows[0]['against']} (95%)"
        " | padding efficiency | idle | memory MB | first loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, value, high = row["ratio"]
        cells = (
            row["model"],
            row["method"],
            f"{row['tokens_per_second']:,.0f}",
            f"{value:.3f} ({low:.3f}–{high:.3f})",
            f"{row['padding_efficiency']:.1%}",
            "–" if row["idle"] is None else f"{row['idle']:.0%}",
            f"{row['peak_memory_mb']:,.0f}",
            f"{row['first_loss']:.6f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def check_losses(rows: list[dict[str, Any]]) -> None:
    """Stop where a method trained another function than the planned runs."""
    losses = {row["method"]: row["first_loss"] for row in rows}
    same = {
        name: loss for name, loss in losses.items() if name != STOCK and not getattr(METHODS.get(name), "joins", False)
    }
    first = next(iter(same.values()), 0.0)
    if far := {name: loss for name, loss in same.items() if abs(loss - first) > SAME_LOSS * abs(first)}:
        raise SystemExit(f"expected the same first loss of all methods, {first:.6f}; got {far}")


def sentence(rows: list[dict[str, Any]]) -> str:
    """What planning gained, in a line."""
    speeds = {row["method"]: row["tokens_per_second"] for row in rows}
    names = {"padding": "padded", "packed_rows": "packed into rows", "planned": "planned"}
    said = ", ".join(f"{names[name]} {speeds[name]:,.0f}" for name in names if name in speeds)
    gains = " and ".join(
        f"{speeds['planned'] / speeds[name]:.2f} × {name}" for name in ("padding", "packed_rows") if name in speeds
    )
    return f"the same samples on this machine, tokens/s: {said} ({gains})"


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """`throughput.json`, `.md` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "throughput.json").write_text(to_json(rows))
    (folder / "throughput.md").write_text(table(rows) + "\n")
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, (axes,) = charts.canvas(1, len(models), width=5.4, height=0.9 + 0.32 * len(METHODS))
    for model, axis in zip(models, axes, strict=True):
        values = {row["method"]: row["tokens_per_second"] for row in rows if row["model"] == model}
        layout = next(row["layout"] for row in rows if row["model"] == model)
        title = f"demo {model.upper()}, layout {layout}"
        charts.bars(axis, values, title=title, x="measured tokens/s", form="{:,.0f}", best="planned")
    charts.save(figure, folder / "throughput.png")


def to_json(rows: list[dict[str, Any]]) -> str:
    """The report's file."""
    return json.dumps({"format": "dynapipe-throughput/1", "rows": rows}, indent=1) + "\n"
