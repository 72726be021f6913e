"""Planned iterations over those of other trainers' packing, as `megatron-dynapipe compare` predicts them.

    python -m benchmarks.planning.rivals [--devices a100 h100] [--settings gpt:1,1,8 …] [--lengths 2048 8192] [--labels]
        [--output FOLDER]

All batches of 65,536 tokens of a maximum length. The plan's layers and virtual stages are chosen once, from the first
batches, as in training. The others run the fastest for each batch of 1, 2 and 4 virtual stages (1F1B, interleaved),
equal layers and whole ones by work, every recompute mode and sizes of rows an eighth of the longest sample apart. A
line per setting and length has the geometric mean of real tokens per second over each, and over the fastest of each
batch the mean and the worst; then which share of the plan's time no plan of the same layers and stages could save
(`split` of `benchmarks/planning/limits.py`), and what the ratio would be then. With --labels the batches of sft_like
alone, whose plans leave out what does not count; the others run all of it.

--output keeps the rows of earlier runs that are not asked for again, and draws them all: `rivals.json`, `rivals.md`,
`rivals.png`. Without --settings it draws what is there.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.common import markdown, number
from benchmarks.planning import dynamic_cp
from benchmarks.planning.cases import COSTS, recorded_batches
from benchmarks.planning.full import answer, arguments, write
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.tools.rivals.methods import TRAINERS as ROWS

TRAINERS = (*ROWS, dynamic_cp.NAME)
"""Those of `compare`, and Megatron-LM's that spreads samples over replicas."""

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "gpt:4,2,4", "t5:1,1,8", "t5:1,2,4")
NAMES = {"gpt": "GPT", "t5": "T5 11B", "gpt-llama-8b": "LLaMA 3 8B", "gpt-qwen-7b": "Qwen 2.5 7B"}
ABOUT = ("costs", "setting", "labels", "maximum")
COLUMNS = ("costs", "setting", "maximum", "batches", *(f"`{name}`" for name in TRAINERS))
COLUMNS += ("**fastest**", "worst", "of the limit", "at the limit", "date")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="*", choices=COSTS, default=tuple(COSTS), help="whose costs")
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--lengths", nargs="*", type=int, default=(2048, 8192), help="maximum lengths of samples")
    parser.add_argument("--labels", action="store_true", help="batches of which some positions do not count")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where rows are kept and drawn")
    args = parser.parse_args()
    names = ("sft_like",) if args.labels else ("flan_like", "flan_more", "sft_like")
    unasked = () if args.labels else ("labels",)
    every = [{key: b[key] for key in b if key not in unasked} for name in names for b in recorded_batches(name)]
    print(markdown(COLUMNS, []), flush=True)
    for device in args.devices:
        for setting in args.settings:
            for length in args.lengths:
                asked = {"model": setting.partition(":")[0].partition("-")[0], "max_seq_len": length, "tokens": 65_536}
                chosen = [batch for batch in every if batch.items() >= asked.items()]
                compared = answer("compare", setting, chosen, length, [], device, bounded=True)
                _add_dynamic_cp(compared, setting, chosen, device)
                row = dict(zip(ABOUT, (device, setting, args.labels, length), strict=True)) | figures(compared)
                print("| " + " | ".join(cells(row)) + " |", flush=True)
                if args.output:
                    keep(row, args.output)
    if args.output:
        draw(json.loads((args.output / "rivals.json").read_text()), args.output / "rivals.png")


def _add_dynamic_cp(compared: dict[str, Any], setting: str, batches: list[dict[str, Any]], device: str) -> None:
    """Put the row that `compare` has not to what it printed."""
    model, _, layout = setting.partition(":")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "batches.json"
        write(path, batches)
        _, _, _, command, *words = arguments("compare", model, layout, path, device)
        times = dynamic_cp.milliseconds(build_parser(command).parse_args([command, *words]))
    ratios = []
    for batch, ms in zip(compared["batches"], times, strict=True):
        batch["methods"][dynamic_cp.NAME] = {"ms": ms}
        if ms and (plan := batch["methods"]["dynapipe"].get("ms")):
            ratios.append(ms / plan)
    if ratios:
        compared["methods"]["dynapipe"]["geomean_over"][dynamic_cp.NAME] = statistics.geometric_mean(ratios)


def figures(compared: dict[str, Any]) -> dict[str, Any]:
    """A row of what `compare` printed: the plan's tokens per second over those of others, and what limits it."""
    both = []
    for batch, bounds in zip(compared["batches"], compared["limits"], strict=True):
        ms = {name: batch["methods"][name].get("ms") for name in ("dynapipe", *TRAINERS)}
        fastest = min((ms[name] for name in TRAINERS if ms[name]), default=None)
        if ms["dynapipe"] and fastest:
            both.append((fastest, ms["dynapipe"], bounds.split / 1e6))
    mean = statistics.geometric_mean
    return {
        "batches": len(both),
        "over": compared["methods"]["dynapipe"]["geomean_over"],
        "fastest": mean([other / plan for other, plan, _ in both] or [math.nan]),
        "worst": min((other / plan for other, plan, _ in both), default=math.nan),
        "of_limit": mean([limit / plan for _, plan, limit in both] or [math.nan]),
        "at_limit": mean([other / limit for other, _, limit in both] or [math.nan]),
        "date": time.strftime("%Y-%m-%d"),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    counted = ", targets alone count" if row["labels"] else ""
    over = [number(row["over"].get(name), "{:.3f}") for name in TRAINERS]
    ends = [f"**{row['fastest']:.3f}**", f"{row['worst']:.3f}", f"{row['of_limit']:.0%}", f"{row['at_limit']:.2f}"]
    ends.append(row["date"])
    return [row["costs"], row["setting"] + counted, f"{row['maximum']:,}", f"{row['batches']}", *over, *ends]


def keep(row: dict[str, Any], folder: Path) -> None:
    """Put a row in place of an earlier one of the same costs, setting and length, or behind all."""
    path = folder / "rivals.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    about = [[each[key] for key in ABOUT] for each in (*rows, row)]
    rows[about.index(about[-1]) : about.index(about[-1]) + 1] = [row]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(COLUMNS, [cells(each) for each in rows]) + "\n")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each device: bars of the mean over the fastest, with the worst batch and what no plan can pass."""
    devices = sorted({row["costs"] for row in rows}, reverse=True)
    most = max(sum(row["costs"] == device for row in rows) for device in devices)
    figure, (axes,) = charts.canvas(1, len(devices), width=6.4, height=1.0 + 0.32 * most)
    for axis, device in zip(axes, devices, strict=True):
        own = [row for row in rows if row["costs"] == device]
        named = {f"{_name(row)}, {row['maximum']:,}: {row['fastest']:.2f}": row["fastest"] for row in own}
        charts.bars(
            axis, named, title=f"costs of {device.upper()}s", x="times as fast as the fastest of others", form=""
        )
        for mark, key, label in (("|", "worst", "worst batch"), ("D", "at_limit", "what no plan can pass")):
            places = {"markersize": 6, "zorder": 9, "linestyle": ""}
            axis.plot([row[key] for row in own], range(len(own)), marker=mark, color="#b5343c", label=label, **places)
        axis.set_ylim(most - 0.5, -0.5)
        axis.set_xlim(1.0, 0.03 + max(row["at_limit"] for row in own))
    charts.legend(figure, [axes])
    charts.save(figure, path)


def _name(row: dict[str, Any]) -> str:
    model, _, layout = row["setting"].partition(":")
    return f"{NAMES[model]} {layout}{', targets count' if row['labels'] else ''}"


if __name__ == "__main__":
    main()
