"""How good the cost models are: every figure from one command.

    python benchmarks/cost_accuracy/run.py --output FOLDER [--models t5]

Published profiles: a random quarter of the points predicts the rest; the analytic model.
This machine: profiles of the two demo models, then planned iterations over two stages, predicted against measured; in
eight minutes, with fewer iterations on a slow machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynapipe.cost import A100_RATES, ModelShape
from megatron_dynapipe.cost.analytic import layer_costs
from megatron_dynapipe.cost.check import held_out_errors
from megatron_dynapipe.cost.format import CostFile, read_file, read_points
from megatron_dynapipe.cost.work import LayerWork
from megatron_dynapipe.units import ModelFamily, Recompute

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(5)
STARTING_MINUTES = 0.4
"""Of one model's iterations: starting, warming up, counting memory."""
PUBLISHED = {
    "gpt_6.7b": ModelShape(family=ModelFamily.GPT, hidden=4096, heads=32, kv_channels=128, ffn=16384, vocabulary=50304),
    "t5_11b": ModelShape(family=ModelFamily.T5, hidden=1024, heads=128, kv_channels=128, ffn=65536, vocabulary=32128),
}
"""The published models."""


def main() -> None:
    """Run what is asked for; print a table and write figures.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (%(default)s)")
    parser.add_argument("--budget-minutes", type=float, default=1.0, help="of each profile (%(default)s)")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--learned-iterations", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=24, help="smaller than the demo's: many iterations")
    parser.add_argument("--models", default="t5,gpt", help="(%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.minutes * 60
    figures: dict[str, Any] = {}
    for name in PUBLISHED:
        figures[name] = published(ROOT / f"benchmarks/data/a100/{name}.json.gz", name)
        report(name, figures[name])
    models = [model for model in args.models.split(",") if model]
    for index, model in enumerate(models):
        share = (end - time.monotonic()) / 60 / (len(models) - index)
        figures[model] = this_machine(model, args, share)
        report(f"demo {model}", figures[model])
    (args.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def published(path: Path, name: str) -> dict[str, Any]:
    """Errors of the fit and of the analytic model on a published profile."""
    file, _ = read_file(path)
    runs = [held_out_errors(file, keep=0.25, seed=seed) for seed in SEEDS]
    fit = {
        quantity: {which: max(getattr(run[quantity], which) for run in runs) for which in ("median", "p90")}
        for quantity in runs[0]
    }
    return {
        "a quarter predicts the rest (worst of five seeds)": fit,
        "analytic (median)": analytic_errors(file, PUBLISHED[name], A100_RATES),
    }


def analytic_errors(file: CostFile, shape: ModelShape, rates: Any) -> dict[str, float]:
    """Median relative errors over all points of a file, by quantity."""
    errors: dict[str, list[Any]] = {}
    for key, entry in file.keys.items():
        layer = LayerWork(shape=shape, tensor_parallel=entry.tp)
        for (quantity, part), points in read_points(entry, file.family, key).items():
            b, *lengths = np.array(list(points), float).T
            kind, _, way = part.partition(".")
            if kind == "decoder":
                work = layer.decoder(b, lengths[1], lengths[0])
            else:
                work = (layer.head if kind == "postprocess" else layer.encoder)(b, lengths[0])
            costs = layer_costs(work, rates, Recompute.NONE if kind == "postprocess" else entry.recompute)
            row = {"time_ms": int(way == "backward"), "stored_activation_mb": 2, "peak_activation_mb": 3}[quantity]
            errors.setdefault(quantity, []).append(np.abs(costs[row] / 1e6 / np.array(list(points.values())) - 1))
    return {quantity: float(np.median(np.concatenate(found))) for quantity, found in errors.items()}


def this_machine(model: str, args: argparse.Namespace, minutes: float) -> dict[str, Any]:
    """Profile a demo model here, then compare predictions with real iterations over two stages.

    Two ranks measure at the same time, as two will train: what they share, caches and memory, costs both then.
    """
    flags = ["--", "--dynapipe-config", str(ROOT / f"configs/demo_{model}.yaml"), "--dynapipe-limit-rc-type", "none"]
    flags += ["--global-batch-size", str(args.global_batch_size)]
    file = args.output / f"{model}.json"
    started = time.monotonic()
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    profile = ["-m", "megatron_dynapipe", "profile", "--model", model, "--output", str(file), "--recompute", "none"]
    call([*ranks, *profile, "--budget-minutes", str(args.budget_minutes), *flags])
    seconds = time.monotonic() - started
    script = [str(ROOT / "benchmarks/cost_accuracy/iterations.py"), "--model", model, "--cost-model", str(file)]
    left = max(minutes - seconds / 60 - STARTING_MINUTES, 0.1)
    counts = ["--iterations", str(args.iterations), "--learned-iterations", str(args.learned_iterations)]
    printed = call([*ranks, *script, *counts, "--minutes", f"{left:.2f}", *flags])
    figures: dict[str, Any] = {"profile_seconds": seconds, **json.loads(printed.splitlines()[-1])}
    return figures


def call(command: list[str]) -> str:
    """Run a command of this checkout; its standard output."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def report(name: str, figures: dict[str, Any]) -> None:
    """Print figures as lines."""
    print(name)
    for what, value in figures.items():
        shown = {name: each for name, each in value.items() if name != "pairs"} if isinstance(value, dict) else value
        print(f"  {what}: {json.dumps(shown, default=str)}", flush=True)


if __name__ == "__main__":
    main()
