"""The real experiments: the demo's models trained on the devices at hand, by `benchmarks/throughput`.

Two pipeline stages, the demo mixture, costs that `profile` measures once (kept in `.demo/paper`). Every method trains
the same batches in turns; tokens/s are real tokens, ratios are over pairs of one batch at nearly one time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import charts
from output import PAPER, ROOT, markdown, write
from simulate import say

sys.path.insert(0, str(ROOT / "benchmarks" / "throughput"))
from methods import ABLATIONS as REPLACED
from methods import METHODS as TRAINED

CONFIGS = {"t5": ROOT / "configs" / "demo_t5.yaml", "gpt": ROOT / "configs" / "demo_gpt.yaml"}
LAYERS = {"t5": ["--encoder-layers", "4", "--decoder-layers", "4"], "gpt": ["--layers", "8"]}
"""Of `plan`."""
DATA = ROOT / ".demo" / "data"
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


def throughput(over: str, output: Path, places: Sequence[int] = ()) -> None:
    """Tokens/s over the maximum length, or over the size of global batches, at all places or the given ones."""
    rows = []
    for model in CONFIGS:
        for place in places or (LENGTHS if over == "length" else SIZES):
            length, samples = (place, USUAL_SIZE) if over == "length" else (LONGEST, place)
            chosen = [name for name in METHODS if name in TRAINED and (name != "padding" or length <= PADDING_UP_TO)]
            rows += [{"place": place, **row} for row in trained(model, chosen, length, samples)]
    name = f"throughput-{over}-real"
    draw_throughput(rows, over, output / f"{name}.png")
    write(output, name, rows, throughput_table(rows, over), paper=PAPER)


def ablations(output: Path) -> None:
    """Tokens/s with one part of the planner replaced."""
    names = ["planned", BASE, *REPLACED]
    rows = [row for model in CONFIGS for row in trained(model, names, LONGEST, USUAL_SIZE, against=BASE)]
    figure, (axes,) = charts.canvas(1, len(CONFIGS), width=6.2, height=0.8 + 0.3 * len(names))
    for model, axis in zip(CONFIGS, axes, strict=True):
        values = {row["method"]: row["ratio"][1] for row in rows if row["model"] == model}
        x = "measured tokens/s, planned and padded = 1"
        charts.bars(axis, values, title=f"demo {model}, two stages", x=x, form="{:.2f}", best=BASE)
        axis.axvline(1, color="#33393f", linewidth=0.8, linestyle=":")
    charts.save(figure, output / "ablations-real.png")
    lines = [
        [f"demo {row['model']}", row["method"], f"{row['tokens_per_second']:,.0f}", _interval(row["ratio"])]
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
        command = [sys.executable, str(ROOT / "benchmarks" / "throughput" / "run.py"), "--model", model]
        command += [
            "--methods",
            ",".join(ordered),
            "--against",
            against,
            "--ranks",
            str(RANKS),
            "--batches",
            "4",
            "--rounds",
            "2",
        ]
        command += ["--data", str(DATA), "--cost-model", str(costs), "--json", str(report), "--", *flags]
        subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=DEADLINE_S)
        rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return rows


def profiled(model: str) -> Path:
    """Costs of the demo's model on this machine, measured the first time."""
    path = ROOT / ".demo" / "paper" / f"{model}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        say(f"measuring the costs of {model}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
        command += ["megatron_dynapipe", "profile", "--model", model, "--output", str(path)]
        command += ["--budget-minutes", str(PROFILE_MINUTES), "--", "--dynapipe-config", str(CONFIGS[model])]
        command += ["--dynapipe-data", str(DATA)]
        subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=DEADLINE_S)
    return path


def environment() -> dict[str, str]:
    """One thread a process, of this checkout."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def draw_throughput(rows: Sequence[dict[str, Any]], over: str, path: Path) -> None:
    """A panel for each model."""
    figure, (axes,) = charts.canvas(1, len(CONFIGS), width=5.4, height=3.6)
    for model, axis in zip(CONFIGS, axes, strict=True):
        own = [row for row in rows if row["model"] == model]
        places = sorted({row["place"] for row in own})
        speeds = {(row["method"], row["place"]): row["tokens_per_second"] / 1e3 for row in own}
        series = {
            method: [speeds.get((method, place)) for place in places]
            for method in dict.fromkeys(row["method"] for row in own)
        }
        x = "maximum length, tokens" if over == "length" else "global batch, samples"
        title = f"demo {model}, two stages"
        charts.lines(axis, [str(place) for place in places], series, title=title, x=x, y="k tokens/s, measured")
    charts.legend(figure, [axes])
    charts.save(figure, path)


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
            _interval(row["ratio"]),
            f"{row['padding_efficiency']:.1%}",
            f"{row['idle']:.0%}",
            f"{row['prediction_error']:.0%}",
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def _interval(ratio: Sequence[float]) -> str:
    low, value, high = ratio
    return "1" if low == high == 1 else f"{value:.3f} ({low:.3f}–{high:.3f})"
