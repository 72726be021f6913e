"""Full planning, order to verified plan, held against the published planner on the same batches.

    python -m benchmarks.planning.full [--tokens 65536] [--settings t5:1,1,8 …] [--split auto] [--layout padded]
        [--mixtures flan_like flan_more] [--lengths 2048 8192] [--device h100]

Every setting's batches are planned by `megatron-dynapipe plan --json` in one process on one core, and scored by
`score_plans.py`, which rebuilds time and memory from the cost model file alone. Columns:

    ms          median planning time of a batch, order to encoded plan, wall-clock
    CPU ms      the same in processor time, which other work on the machine changes less
    verify      median share of that time that proving the plan takes
    faster      geometric mean over batches of the published planner's planning time to ours (wall-clock)
    ratio, min  predicted tokens per second to the published planner's: geometric mean, worst batch
    idle        mean share of device time in which no pass runs
    bound       mean of bound over plan: for each stage its work and the least fill and drain around it, the largest
                over stages, for the micro-batches of the plan
    of L2       mean of the limit of stages and memory over plan (`benchmarks/planning/limits.py`)

The published planner is compared where its results are known: on A100s, and batches of flan_like.

With `--split auto` each batch's layer split is chosen from the larger batches of its mixture and maximum length, and
every maximum length has a row of its own, too.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, environment, markdown
from benchmarks.planning import limits
from benchmarks.planning.cases import COMPUTED, COSTS, MEMORY_MB, published_results, recorded_batches

MODELS = {"gpt": ("--layers 32", "4096"), "t5": ("--encoder-layers 24 --decoder-layers 24", "1024")}
"""Flags of the layers, and the hidden size."""
SETTINGS = (
    *("gpt:1,1,8", "gpt:1,2,4", "gpt:1,4,2", "gpt:2,1,4", "gpt:4,2,4"),
    *("t5:1,1,8", "t5:1,2,4", "t5:1,4,2", "t5:1,8,1", "t5:2,2,2"),
)
SPLIT_FROM_TOKENS = 262_144
COLUMNS = ("setting", "batches", "ms", "CPU ms", "verify", "faster", "ratio", "worst", "idle", "bound", "of L2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536, help="size of the batches to plan")
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--split", choices=("equal", "auto"), default="equal", help="layers per stage")
    parser.add_argument("--layout", choices=("auto", "padded", "packed"), default="auto", help="of micro-batches")
    parser.add_argument("--slices", default="auto", help="auto, off or N: long samples of GPT cut into pieces")
    parser.add_argument("--split-backward", default="off", help="auto, on or off: backward passes in halves")
    parser.add_argument("--evaluations", type=int, help="of the search; default: the planner's")
    parser.add_argument("--mixtures", nargs="*", default=["flan_like"], help="files of batches")
    parser.add_argument("--lengths", nargs="*", type=int, help="maximum lengths of samples; default: all")
    parser.add_argument("--device", choices=COSTS, default="a100", help="whose costs")
    args = parser.parse_args()
    every = [batch for name in args.mixtures for batch in recorded_batches(name)]
    results = published_results() if args.device == "a100" else []
    print(markdown(COLUMNS, []), flush=True)
    rows: dict[str, list[dict]] = {model: [] for model in MODELS}
    for setting in args.settings:
        model, _, layout = setting.partition(":")
        data, tensor, pipeline = map(int, layout.split(","))
        own = {"model": model, "data_parallel": data, "tensor_parallel": tensor, "pipeline_parallel": pipeline}
        known = {result["batch"]: result for result in results if result.items() >= own.items()}
        chosen = [b for b in every if b["model"] == model and b["tokens"] == args.tokens]
        chosen = [b for b in chosen if b["max_seq_len"] in (args.lengths or [b["max_seq_len"]])]
        planned = []
        for group in _groups(chosen, args.split):
            part = [{**row, "published": known.get(row["id"])} for row in _plan(args, model, layout, group, every)]
            if len(group) < len(chosen):
                _row(f"{setting}, {group[0]['max_seq_len']}", part)
            planned += part
        rows[model] += planned
        _row(setting, planned)
    for model, planned in rows.items():
        if any("error" not in row for row in planned):
            _row(f"all {model}", [row for row in planned if "error" not in row])


def _groups(batches: list[dict], split: str) -> list[list[dict]]:
    """Batches that are planned with one layer split."""
    lengths = sorted({batch["max_seq_len"] for batch in batches}) if split != "equal" else [None]
    return [[batch for batch in batches if length in (None, batch["max_seq_len"])] for length in lengths]


def _plan(args: argparse.Namespace, model: str, layout: str, batches: list[dict], every: list[dict]) -> list[dict]:
    """Plan some batches of a setting and score them; one dictionary per batch."""
    layers, hidden = MODELS[model]
    data, tensor, pipeline = layout.split(",")
    cost = COSTS[args.device][model]
    hidden = "4096" if args.device == "h100" else hidden
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"plan": folder / "batches.json", "split": folder / "split.json", "report": folder / "report.json"}
        write(files["plan"], batches)
        command = arguments("plan", model, layout, files["plan"], args.device)
        command += ["--layout", args.layout]
        command += ["--slices", args.slices if model == "gpt" else "off"]
        command += ["--split-backward", args.split_backward]
        if args.evaluations is not None:
            command += ["--search-evaluations", str(args.evaluations)]
        if args.split == "auto":
            command += split_from(files["split"], model, batches[0]["max_seq_len"], every)
        planned = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
        if planned.returncode == 2:
            return [{"id": batch["id"], "error": planned.stderr.strip().splitlines()[0]} for batch in batches]
        files["report"].write_text(planned.stdout)
        bounds = dict(zip((batch["id"] for batch in batches), limits.of_arguments(command[3:]), strict=True))
        score = [sys.executable, ROOT / "benchmarks/planning/score_plans.py", files["report"], files["plan"], cost]
        split = "equal" if args.split == "equal" else "auto"
        score += ["--model", model, *layers.split(), "--hidden", hidden, "--split", split]
        score += ["--dp", data, "--tp", tensor, "--pp", pipeline, "--memory-mb", str(MEMORY_MB[args.device])]
        scored = subprocess.run(score, check=False, capture_output=True, text=True)
        lines = [json.loads(line) for line in scored.stdout.splitlines() if line.startswith("{")]
        iterations = {plan["id"]: plan for plan in json.loads(planned.stdout)["iterations"]}
    for line in lines:
        line["seconds"] = iterations[line["id"]]["planning_seconds"]
        line["processor_seconds"] = iterations[line["id"]]["planning_processor_seconds"]
        if "error" not in line:
            line["of_limit"] = bounds[line["id"]].memory / 1e6 / iterations[line["id"]]["predicted_ms"]
        if args.device != "a100":
            line.pop("ratio", None)
    return lines


def arguments(command: str, model: str, layout: str, batches: Path, device: str = "a100") -> list[str]:
    """The command line of `plan` or `compare` for one setting."""
    data, tensor, pipeline = layout.split(",")
    words = [sys.executable, "-m", "megatron_dynapipe", command, "--json", "--batches", str(batches)]
    words += ["--data-parallel", data, "--tensor-parallel", tensor, "--pipeline-parallel", pipeline]
    words += ["--distributed-optimizer", "--cost-model", str(COSTS[device].get(model, "analytic"))]
    if model in COMPUTED:
        return [*words, "--cluster", "h100_80gb", "--model-config", str(ROOT / COMPUTED[model])]
    layers, hidden = MODELS[model]
    words += ["--model", model, *layers.split(), "--hidden-size", "4096" if device == "h100" else hidden]
    return [*words, "--device-memory-mb", str(MEMORY_MB[device])]


def answer(
    command: str,
    setting: str,
    batches: list[dict],
    longest: int,
    every: list[dict],
    device: str = "a100",
    split: str = "auto",
    *,
    bounded: bool = False,
) -> dict:
    """What `plan` or `compare` prints, and if `bounded` the `Limits` of each batch under the same arguments.

    An auto split is chosen by `split_from`, or from the first batches planned.
    """
    model, _, layout = setting.partition(":")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "batches.json", batches)
        words = arguments(command, model, layout, folder / "batches.json", device)
        is_chosen = split == "auto"
        words += split_from(folder / "split.json", model, longest, every) if is_chosen else ["--layer-split", split]
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment())
        if done.returncode == 2:
            sys.exit(done.stderr)
        bounds = {"limits": limits.of_arguments(words[3:])} if bounded else {}
    return json.loads(done.stdout) | bounds


def split_from(path: Path, model: str, longest: int, every: list[dict]) -> list[str]:
    """Arguments for a layer split chosen from the larger batches of a mixture and maximum length, if it has such."""
    own = [b for b in every if b["model"] == model.partition("-")[0] and b["max_seq_len"] == longest]
    write(path, larger := [b for b in own if b["tokens"] == SPLIT_FROM_TOKENS])
    return ["--layer-split", "auto", *(("--split-from", str(path)) if larger else ())]


def write(path: Path, batches: list[dict]) -> None:
    """A batches file."""
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches}))


def _row(name: str, rows: list[dict]) -> None:
    planned = [row for row in rows if "error" not in row]
    compared = [row for row in planned if "ratio" in row]
    cells = [name, f"{len(planned)}/{len(rows)}"]
    if planned:
        ratios = [row["ratio"] for row in compared]
        faster = [row["published"]["planning_seconds"] / row["seconds"]["total"] for row in compared] or [math.nan]
        cells += [
            f"{statistics.median(row['seconds']['total'] for row in planned) * 1e3:.1f}",
            f"{statistics.median(row['processor_seconds'] for row in planned) * 1e3:.1f}",
            f"{statistics.median(row['seconds']['verify'] / row['seconds']['total'] for row in planned):.1%}",
            f"{statistics.geometric_mean(faster):.0f}",
            f"{statistics.geometric_mean(ratios or [math.nan]):.3f}",
            f"{min(ratios, default=math.nan):.3f}",
            f"{statistics.mean(1 - row['busy'] for row in planned):.1%}",
            f"{statistics.mean(row['of_bound'] for row in planned):.1%}",
            f"{statistics.mean(row['of_limit'] for row in planned):.3f}",
        ]
    print("| " + " | ".join(cells) + " |", flush=True)
    for row in rows:
        if "error" in row:
            print(f"    {row['id']}: {row['error']}", file=sys.stderr)


if __name__ == "__main__":
    main()
