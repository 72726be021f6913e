"""Profile a GPT of the 1.3B shape and a T5 layer on this machine's device, and hold both against training on it.

    python benchmarks/profiles/run.py --output benchmarks/profiles            # one GPU, ten minutes
    python benchmarks/profiles/run.py --output FOLDER --small                 # any machine: tiny models, a minute

Writes `gpt.json` and `t5.json`, cost model files with their provenance, and `figures.json`: errors of predicted
iteration time and peak memory over iterations on one device. Prints the figures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMON = (
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --train-iters 1 --lr 1e-4 --eval-interval 1"
    " --dynapipe-limit-rc-type none"
)
GPT = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
T5 = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096"
    " --seq-length 2048 --decoder-seq-length 512 --max-position-embeddings 2048"
)
LARGE = (
    "--global-batch-size 256 --bf16 --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion"
)
SMALL = (
    "--global-batch-size 8 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64"
    " --max-position-embeddings 64 --dynapipe-long-samples truncate"
)
STARTING_MINUTES = 0.5
"""Of one model's iterations: starting, warming up, counting memory."""


def main() -> None:
    """Profile and train both models; print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="tiny models: that it runs")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (%(default)s)")
    parser.add_argument("--models", default="gpt,t5", help="(%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    models = args.models.split(",")
    end = time.monotonic() + args.minutes * 60
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        call("-m", "megatron_dynapipe", "data", "demo", "--output", folder)
        for index, model in enumerate(models):
            share = (end - time.monotonic()) / 60 / (len(models) - index)
            figures[model] = held_against_training(model, args.output, Path(folder), share, small=args.small)
            print(model, json.dumps(figures[model], indent=1), flush=True)
    (args.output / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def held_against_training(model: str, output: Path, data: Path, minutes: float, *, small: bool) -> dict[str, Any]:
    """Profile one model, then train it on one device by plans made from the profile: figures with provenance."""
    flags = [*COMMON.split(), *(GPT if model == "gpt" else T5).split(), *(SMALL if small else LARGE).split()]
    flags += ["--dynapipe-data", str(data)]
    if small and model == "t5":
        flags += ["--decoder-seq-length", "32"]
    vocabulary = ["--vocabulary", "500" if small else "50000"]
    file, started = output / f"{model}.json", time.monotonic()
    options = ["--model", model, "--output", str(file), "--recompute", "none", *vocabulary]
    options += ["--budget-minutes", f"{0.08 if small else minutes * 0.6:.2f}"]
    options += ["--max-positions", "512" if small else "65536"]
    call("-m", "megatron_dynapipe", "profile", *options, "--", *flags)
    left = max(minutes - (time.monotonic() - started) / 60 - STARTING_MINUTES, 0.1)
    script = [str(ROOT / "benchmarks/cost_accuracy/iterations.py"), "--model", model, "--cost-model", str(file)]
    counts = ["--iterations", "3" if small else "50", "--learned-iterations", "0", "--minutes", f"{left:.2f}"]
    rank = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    printed = call(*rank, *script, *counts, *vocabulary, "--", *flags)
    provenance = json.loads(file.read_text(encoding="utf-8"))["provenance"]
    return {**json.loads(printed.splitlines()[-1]), "provenance": provenance}


def call(*command: str) -> str:
    """Run Python on this checkout; its standard output."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
