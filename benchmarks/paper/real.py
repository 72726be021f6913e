"""The real experiments: the demo's models trained on the devices at hand, by `benchmarks/throughput`.

Two pipeline stages, the demo mixture, costs that `profile` measures once (kept in `.demo/paper`). Every method trains
the same batches in turns; tokens/s are real tokens, ratios are over pairs of one batch at nearly one time.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.common import DEMO_DATA, ROOT, markdown, run_quietly, say, show_interval, torchrun
from benchmarks.paper.output import chart, write
from benchmarks.throughput.methods import ABLATIONS as REPLACED
from benchmarks.throughput.methods import METHODS as TRAINED

CONFIGS = {"t5": ROOT / "configs" / "demo_t5.yaml", "gpt": ROOT / "configs" / "demo_gpt.yaml"}
RANKS = 2
LONGEST = 1536
LENGTHS, SIZES = (192, 512, LONGEST), (16, 32, 64)
"""Maximum lengths in tokens; samples of a global batch."""
USUAL_SIZE = 32
LONGEST_TARGET = 264
METHODS = ("planned", "packed_rows", "packing", "token_based", "padding")
"""Those of them that `benchmarks/throughput` trains, padding where it does not take minutes."""
PADDING_UP_TO = 512
BASE = "planned_padded"
PROFILE_MINUTES = 0.7
DEADLINE_S = 1800.0


def throughput(over: str, places: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Rows over the maximum length, or over the size of global batches, at all places or the given ones."""
    rows = []
    for model in CONFIGS:
        for place in places or (LENGTHS if over == "length" else SIZES):
            length, samples = (place, USUAL_SIZE) if over == "length" else (LONGEST, place)
            chosen = [name for name in METHODS if name in TRAINED and (name != "padding" or length <= PADDING_UP_TO)]
            rows += [{"place": place, **row} for row in trained(model, chosen, length, samples)]
    return rows


def ablations(output: Path) -> None:
    """Tokens/s with one part of the planner replaced."""
    names = ["planned", BASE, *REPLACED]
    rows = [row for model in CONFIGS for row in trained(model, names, LONGEST, USUAL_SIZE, against=BASE)]
    figure, (axes,) = charts.canvas(1, len(CONFIGS), width=6.2, height=0.8 + 0.3 * len(names))
    for model, axis in zip(CONFIGS, axes, strict=True):
        values = {row["method"]: row["ratio_to_planned"][1] for row in rows if row["model"] == model}
        x = "measured tokens/s, planned and padded = 1"
        charts.bars(axis, values, title=f"demo {model}, two stages", x=x, form="{:.2f}", best=BASE)
        axis.axvline(1, color="#33393f", linewidth=0.8, linestyle=":")
    charts.save(figure, chart(output, "ablations-real"))
    lines = [
        [
            f"demo {row['model']}",
            row["method"],
            f"{row['tokens_per_second']:,.0f}",
            show_interval(row["ratio_to_planned"]),
        ]
        for row in rows
    ]
    table = markdown(["model", "variant", "tokens/s", f"ratio to {BASE} (95%)"], lines)
    write(output, "ablations-real", rows, table)


def trained(
    model: str, methods: Sequence[str], length: int, samples: int, *, against: str = "planned"
) -> list[dict[str, Any]]:
    """The rows of `benchmarks/throughput`: a few batches of samples of up to `length` tokens by every method."""
    say(f"training {model} by {', '.join(methods)}: maximum length {length}, {samples} samples")
    costs = profiled(model)
    flags = ["--seq-length", str(length), "--global-batch-size", str(samples), "--dynapipe-long-samples", "truncate"]
    if model == "t5":
        flags += ["--decoder-seq-length", str(min(length, LONGEST_TARGET))]
    ordered = [against, *(name for name in methods if name != against)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, ROOT / "benchmarks" / "throughput" / "run.py", "--model", model, "--ranks", RANKS]
        command += ["--methods", ",".join(ordered), "--against", against, "--batches", 4, "--rounds", 2]
        command += ["--data", DEMO_DATA, "--cost-model", costs, "--json", report, "--", *flags]
        run_quietly(command, timeout_s=DEADLINE_S)
        rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return rows


def profiled(model: str) -> Path:
    """Costs of the demo's model on this machine, measured the first time."""
    path = ROOT / ".demo" / "paper" / f"{model}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        say(f"measuring the costs of {model}")
        command = [*torchrun(RANKS), "-m", "megatron_dynapipe", "profile", "--model", model, "--output", path]
        command += ["--budget-minutes", PROFILE_MINUTES, "--", "--dynapipe-config", CONFIGS[model]]
        run_quietly([*command, "--dynapipe-data", DEMO_DATA], timeout_s=DEADLINE_S)
    return path


def throughput_table(rows: Sequence[dict[str, Any]], over: str) -> str:
    """A line for every method at every place."""
    columns = ["model", "maximum length" if over == "length" else "samples", "method", "tokens/s"]
    columns += ["ratio to planned (95%)", "padding efficiency", "idle", "prediction error, median"]
    lines = [
        [
            f"demo {row['model']}",
            str(row["place"]),
            row["method"],
            f"{row['tokens_per_second']:,.0f}",
            show_interval(row["ratio_to_planned"]),
            f"{row['padding_efficiency']:.1%}",
            f"{row['idle']:.0%}",
            f"{row['prediction_error']:.0%}",
        ]
        for row in rows
    ]
    return markdown(columns, lines)
