"""The throughput benchmark's figures: a row for each method, as JSON, Markdown and a chart."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.common import interval, markdown, number, ratio_of_sums, show_interval
from benchmarks.throughput.methods import METHODS, STOCK

Results = dict[int, dict[str, Any]]
"""A method's answers by turn."""
SAME_LOSS, SAME_LOSS_BF16 = 1e-4, 2.0**-7
"""Relative distance within which the first losses of methods lie that train the same function; in bf16, a rounding."""


def figures(about: dict[str, Any], results: Results, base: Results, against: str = "planned") -> dict[str, Any]:
    """One method's row, over the turns that it took; turn 0 is the warm-up, which gives the first loss.

    Args:
        about: the row's first entries: what was run, and where.
        results: of the method.
        base: of the method `against`, to which the ratio is, in turns with this one.
        against: its name.
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
    elapsed = sum(each["ms"] for each in timed)
    shares = [each["share_of_peak"] for each in timed if each.get("share_of_peak")]
    stepping = sum(each.get("optimizer_ms", 0.0) for each in timed)
    planning = [each["planning_ms"] for each in timed if each["planning_ms"] is not None]
    return about | {
        "tokens_per_second": tokens / elapsed * 1e3,
        "against": against,
        f"ratio_to_{against}": interval(pairs, ratio_of_sums),
        "padding_efficiency": min(tokens / sum(each["positions"] for each in timed), 1.0),
        "peak_memory_mb": max(max(each["peaks_mb"]) for each in timed),
        "last_stage_mb": max(each["peaks_mb"][-1] for each in timed),
        "idle": statistics.mean(idle) if idle else None,
        "optimizer_share": stepping / elapsed if stepping else None,
        "planning_ms": statistics.mean(planning) if planning else None,
        "planning_share": sum(planning) / elapsed if planning else None,
        "micro_batches": statistics.mean(each["micro_batches"] for each in timed),
        "prediction_error": statistics.median(errors) if errors else None,
        "first_loss": results[0]["loss"],
        "share_of_peak": statistics.mean(shares) if shares else None,
    }


_WITHOUT_PEAK = 11
"""Columns where the devices' peak is not known."""


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    against = " or ".join(sorted({row["against"] for row in rows}))
    columns = ["model", "layout", "maximum length", "method", "tokens/s", f"ratio to {against} (95%)"]
    columns += ["padding efficiency", "idle", "planning / iteration", "memory MB", "first loss"]
    columns += ["of peak"] * any(row.get("share_of_peak") for row in rows)
    lines = []
    for row in rows:
        planning = row["planning_ms"]
        lines.append(
            [
                row["model"],
                row["layout"],
                f"{row['max_seq_len']:,}",
                row["method"],
                f"{row['tokens_per_second']:,.0f}",
                show_interval(row[f"ratio_to_{row['against']}"]),
                f"{row['padding_efficiency']:.1%}",
                number(row["idle"], "{:.0%}"),
                "–" if planning is None else f"{planning:,.0f} ms, {row['planning_share']:.1%}",
                f"{row['peak_memory_mb']:,.0f}",
                f"{row['first_loss']:.6f}",
                *[number(row.get("share_of_peak"), "{:.1%}")][: len(columns) - _WITHOUT_PEAK],
            ]
        )
    return markdown(columns, lines)


def check_losses(rows: list[dict[str, Any]], tolerance: float = SAME_LOSS) -> None:
    """Stop where a method trained another function than the others of one model, layout and maximum length."""
    losses = {row["method"]: row["first_loss"] for row in rows}
    same = {
        name: loss for name, loss in losses.items() if name != STOCK and not getattr(METHODS.get(name), "joins", False)
    }
    first = next(iter(same.values()), 0.0)
    if far := {name: loss for name, loss in same.items() if abs(loss - first) > tolerance * abs(first)}:
        raise SystemExit(f"expected the same first loss of all methods, {first:.6f}; got {far}")


def sentence(rows: list[dict[str, Any]], *, load: float = 0.0, cores: int = 1) -> str:
    """What planning gained in one turn, in a line: over packed rows first, the stronger rival.

    With `load`, how many processes wanted to run on so many cores, it says where others made the speeds meaningless.
    """
    speeds = {row["method"]: row["tokens_per_second"] for row in rows}
    names = {"planned": "planned", "packed_rows": "packed into rows", "padding": "padded"}
    said = ", ".join(f"{name} {speeds[method]:,.0f}" for method, name in names.items() if method in speeds)
    gain = ""
    if "packed_rows" in speeds:
        factor = speeds["planned"] / speeds["packed_rows"]
        gain = f"measured once, plans trained {factor:.2f} times as fast as packed rows; "
    busy = f"; the machine was busy ({load:.0f} processes on {cores} cores), which makes these numbers meaningless"
    return f"{gain}the same samples, tokens/s: {said}{busy if load > 2 * cores else ''}"


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """`throughput.json`, `.md` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "throughput.json").write_text(to_json(rows))
    (folder / "throughput.md").write_text(table(rows) + "\n")
    draw(rows, folder / "throughput.png")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for every case: models side by side, layouts and maximum lengths below each other."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases = {model: list(dict.fromkeys(_case(row) for row in rows if row["model"] == model)) for model in models}
    most = max(len({row["method"] for row in rows if row["model"] == model}) for model in models)
    depth = max(map(len, cases.values()))
    figure, axes = charts.canvas(depth, len(models), width=5.4, height=0.9 + 0.32 * max(most, 4))
    for column, model in enumerate(models):
        for line, axis in enumerate(panels[column] for panels in axes):
            if line >= len(cases[model]):
                axis.set_visible(False)
                continue
            own = [row for row in rows if row["model"] == model and _case(row) == cases[model][line]]
            speed = {row["method"]: row["tokens_per_second"] for row in own}  # of groups at different times
            values = {row["method"]: speed[row["against"]] * row[f"ratio_to_{row['against']}"][1] for row in own}
            layout, length = cases[model][line]
            title = f"{own[0]['size']} {model.upper()}, layout {layout}, up to {length:,} tokens"
            charts.bars(axis, values, title=title, x="tokens/s in the same turns", form="{:,.0f}", best="planned")
    charts.save(figure, path)


def _case(row: dict[str, Any]) -> tuple[str, int]:
    return row["layout"], row["max_seq_len"]


def to_json(rows: list[dict[str, Any]]) -> str:
    """The report's file."""
    return json.dumps({"format": "dynapipe-throughput/1", "rows": rows}, indent=1) + "\n"
