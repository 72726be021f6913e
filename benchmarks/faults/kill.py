"""Kill -9 of one rank at a random moment, then resume from the last checkpoint: does the loss curve join?

    python benchmarks/faults/kill.py --data .demo/data [--repetitions 20] [--family t5]

One run that nobody disturbs gives the losses; every repetition starts anew, loses a rank, and is resumed to its end.
Losses of iterations after the resume must be those of the undisturbed run. Megatron's second log line after a start is
a mean of two iterations, so the first two lines of every start are not compared. Exit status 1 if any curve parts.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+)")
SMALL = {
    "t5": "--encoder-num-layers 2 --decoder-num-layers 2",
    "gpt": "--num-layers 4",
}
COMMON = "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --global-batch-size 16 --eval-iters 0"


def command(options: argparse.Namespace, folder: Path, extra: str = "") -> list[str]:
    words = f"{SMALL[options.family]} {COMMON} --train-iters {options.iterations} {extra}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        str(ROOT / f"pretrain_{options.family}_multitask.py"),
        *("--dynapipe-config", str(ROOT / "configs" / f"demo_{options.family}.yaml")),
        *("--dynapipe-data", str(options.data), "--dynapipe-report-dir", str(folder / "report")),
        *words.split(),
    ]


def losses(log: Path) -> dict[int, float]:
    """Losses by iteration, without the first two lines."""
    return {int(number): float(loss) for number, loss in LINE.findall(log.read_text())[2:]}


def start(words: list[str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


def run(words: list[str], log: Path) -> dict[int, float]:
    if status := start(words, log).wait(timeout=600):
        raise SystemExit(f"expected a run to end by itself, got status {status}; see {log}")
    return losses(log)


def run_until_killed(words: list[str], log: Path, saved: Path, draw: random.Random) -> str:
    """Start a run, wait for its first checkpoint and a random while longer, and kill a random rank."""
    process = start(words, log)
    deadline = time.monotonic() + 300
    while not (saved / "latest_checkpointed_iteration.txt").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"expected a first checkpoint within 300 s, got none; see {log}")
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 3))
    ranks = [p for p in psutil.Process(process.pid).children() if "multitask.py" in " ".join(p.cmdline())]
    if not ranks:
        process.wait(timeout=60)
        return "the run had ended"
    victim = draw.randrange(len(ranks))
    ranks[victim].kill()
    process.wait(timeout=120)
    return f"rank {victim} killed, the others stopped"


def repeat(options: argparse.Namespace, number: int, expected: dict[int, float], folder: Path) -> bool:
    saved = folder / "saved"
    saving = f"--save {saved} --save-interval 4"
    killed = run_until_killed(command(options, folder, saving), folder / "killed.log", saved, random.Random(number))
    reached = (saved / "latest_checkpointed_iteration.txt").read_text().strip()
    resumed = run(command(options, folder, f"{saving} --load {saved}"), folder / "resumed.log")
    joined = all(abs(loss / expected[iteration] - 1) < 1e-4 for iteration, loss in resumed.items())
    print(
        f"{number}: {killed}; resumed from {reached}: {len(resumed)} losses {'join' if joined else 'PART'}", flush=True
    )
    return joined


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--family", choices=sorted(SMALL), default="t5")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = run(command(options, Path(folder)), Path(folder) / "whole.log")
        joined = 0
        for number in range(options.repetitions):
            own = Path(folder) / str(number)
            own.mkdir()
            joined += repeat(options, number, whole, own)
    print(f"{joined} of {options.repetitions} curves join")
    return 0 if joined == options.repetitions else 1


if __name__ == "__main__":
    sys.exit(main())
