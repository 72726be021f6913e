"""Profile a GPT of the 1.3B shape and a T5 layer on this machine's device, five minutes each.

    python benchmarks/profiles/run.py --output benchmarks/profiles            # a GPU
    python benchmarks/profiles/run.py --output FOLDER --small                 # any machine: tiny models, seconds

Each model's file is then held against real iterations on one device (`benchmarks/cost_accuracy/iterations.py`) where
`--data` names a dataset.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON = (
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --train-iters 1 --lr 1e-4 --eval-interval 1"
)
GPT = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
T5 = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096"
    " --seq-length 2048 --decoder-seq-length 512 --max-position-embeddings 2048"
)
SMALL = "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64"


def main() -> None:
    """Profile both models; print the files' paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="tiny models, seconds: that it runs")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="dataset, for the check against iterations")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for model, shape in (("gpt", GPT), ("t5", T5)):
        flags = [*COMMON.split(), *shape.split(), "--global-batch-size", "8" if args.small else "256"]
        if args.small:
            flags += [*SMALL.split(), *(["--decoder-seq-length", "32"] if model == "t5" else [])]
        else:
            flags += ["--bf16", "--transformer-impl", "local", "--no-persist-layer-norm"]
            flags += ["--no-gradient-accumulation-fusion"]
        file = args.output / f"{'small_' if args.small else ''}{model}.json"
        call("-m", "megatron_dynapipe", "profile", *profile_options(model, file, small=args.small), "--", *flags)
        if args.data is not None:
            flags += ["--dynapipe-data", str(args.data)]
            script = str(ROOT / "benchmarks/cost_accuracy/iterations.py")
            ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            call(*ranks, script, "--model", model, "--cost-model", str(file), "--", *flags)


def profile_options(model: str, file: Path, *, small: bool) -> list[str]:
    """Options of the profile command."""
    options = ["--model", model, "--output", str(file), "--vocabulary", "500" if small else "50000"]
    options += ["--budget-minutes", "0.15" if small else "5"]
    return [*options, "--max-positions", "256" if small else "65536"]


def call(*command: str) -> None:
    """Run Python on this checkout."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
