"""How good the cost models are: every figure from one command.

    python -m benchmarks.cost_accuracy.run --output FOLDER [--models t5] [--size demo|gpu|small]

Published profiles: a random quarter of the points predicts the rest; the analytic model.
This machine: profiles of two models, then planned iterations, predicted against measured; in eight minutes, with fewer
iterations on a slow machine. Sizes: "demo", the demo's models over two stages; "gpu", a GPT of the 1.3B shape and T5
layers on one device; "small", tiny models on one device, to see that it runs. Writes `figures.json`, and for each model
its cost model file with its provenance.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import DEMO_DATA, ROOT, environment, torchrun
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, ModelShape
from megatron_dynapipe.costing.analytic import layer_costs
from megatron_dynapipe.costing.format import CostFile, read_file, read_points
from megatron_dynapipe.costing.work import LayerWork
from megatron_dynapipe.tools.cost_files import held_out_errors

SEEDS = range(5)
STARTING_MINUTES = 0.4
"""Of one model's iterations: starting, warming up, counting memory."""
PUBLISHED = {
    "gpt_6.7b": ModelShape(family=ModelFamily.GPT, hidden=4096, heads=32, kv_channels=128, ffn=16384, vocabulary=50304),
    "t5_11b": ModelShape(family=ModelFamily.T5, hidden=1024, heads=128, kv_channels=128, ffn=65536, vocabulary=32128),
}
"""The published models."""
ON_ONE_DEVICE = (
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --train-iters 1 --lr 1e-4 --eval-interval 1"
)
GPU_SIZED = (
    f"{ON_ONE_DEVICE} --global-batch-size 256 --bf16 --transformer-impl local --no-persist-layer-norm"
    " --no-gradient-accumulation-fusion --seq-length 2048 --max-position-embeddings 2048 --num-attention-heads 16"
)
SMALL = (
    f"{ON_ONE_DEVICE} --global-batch-size 8 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256"
    " --seq-length 64 --max-position-embeddings 64 --dynapipe-long-samples truncate"
)
T5_LAYERS = "--encoder-num-layers 2 --decoder-num-layers 2"
FLAGS = {
    ("gpu", "gpt"): f"{GPU_SIZED} --num-layers 4 --hidden-size 2048",
    ("gpu", "t5"): f"{GPU_SIZED} {T5_LAYERS} --hidden-size 1024 --ffn-hidden-size 4096 --decoder-seq-length 512",
    ("small", "gpt"): f"{SMALL} --num-layers 4",
    ("small", "t5"): f"{SMALL} {T5_LAYERS} --decoder-seq-length 32",
}
"""Of the models that are trained on one device, by size and kind of model."""
VOCABULARY, MOST_POSITIONS = {"gpu": 50_000, "small": 500}, {"gpu": 65_536, "small": 512}


def main() -> None:
    """Run what is asked for; print a table and write figures.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (%(default)s)")
    parser.add_argument("--size", choices=("demo", "gpu", "small"), default="demo", help="of models (%(default)s)")
    parser.add_argument("--models", default="t5,gpt", help="(%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.minutes * 60
    figures: dict[str, Any] = {}
    for name in PUBLISHED if args.size == "demo" else ():
        figures[name] = published(ROOT / f"benchmarks/data/a100/{name}.json.gz", name)
        report(name, figures[name])
    models = [model for model in args.models.split(",") if model]
    for index, model in enumerate(models):
        share = (end - time.monotonic()) / 60 / (len(models) - index)
        figures[model] = this_machine(model, args.size, args.output, share)
        report(f"{args.size} {model}", figures[model])
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
        for (quantity, part), points in read_points(entry, entry.kinds, key).items():
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


def this_machine(model: str, size: str, output: Path, minutes: float) -> dict[str, Any]:
    """Profile a model here, then compare predictions with real iterations: figures, and where they come from.

    The demo's two ranks measure at the same time, as they will train: what they share, caches and memory, costs both.
    """
    flags = ["--", *flags_of(model, size), "--dynapipe-limit-rc-type", "none"]
    of_size = {} if size == "demo" else {"vocabulary": VOCABULARY[size]}
    file, started = output / f"{model}.json", time.monotonic()
    ranks = torchrun(2 if size == "demo" else 1)
    budget = {"demo": 1.0, "gpu": 0.6 * minutes, "small": 0.08}[size]
    profile = {"model": model, "output": file, "recompute": "none", "budget-minutes": f"{budget:.2f}", **of_size}
    if size != "demo":
        profile["max-positions"] = MOST_POSITIONS[size]
    call([*ranks, "-m", "megatron_dynapipe", "profile", *words(profile), *flags])
    seconds = time.monotonic() - started
    left = max(minutes - seconds / 60 - STARTING_MINUTES, 0.1)
    trained = {"model": model, "cost-model": file, "minutes": f"{left:.2f}", **of_size}
    trained |= {"iterations": 3 if size == "small" else 50}
    printed = call([*ranks, "-m", "benchmarks.cost_accuracy.iterations", *words(trained), *flags])
    figures: dict[str, Any] = {"profile_seconds": seconds, **json.loads(printed.splitlines()[-1])}
    return figures | {"provenance": json.loads(file.read_text(encoding="utf-8"))["provenance"]}


def flags_of(model: str, size: str) -> list[str]:
    """Of Megatron and of the run, on the demo's data."""
    if size == "demo":  # smaller batches than the demo's: many iterations
        return ["--dynapipe-config", str(ROOT / f"configs/demo_{model}.yaml"), "--global-batch-size", "24"]
    return [*FLAGS[size, model].split(), "--dynapipe-data", str(DEMO_DATA)]


def words(options: Mapping[str, object]) -> list[str]:
    """A command's options by name."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def call(command: list[str]) -> str:
    """Run a command of this checkout; its standard output."""
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}")
    return done.stdout


def report(name: str, figures: dict[str, Any]) -> None:
    """Print figures as lines."""
    print(name)
    for what, value in figures.items():
        shown = {name: each for name, each in value.items() if name != "pairs"} if isinstance(value, dict) else value
        print(f"  {what}: {json.dumps(shown, default=str)}", flush=True)


if __name__ == "__main__":
    main()
