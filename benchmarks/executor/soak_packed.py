"""Two hundred iterations of packed rows through an entry script: the ranks' memory must not grow.

    python benchmarks/executor/soak_packed.py --model t5 --data .demo/data [--iterations 200]

Two pipeline stages of the demo's model on the CPU, every micro-batch a packed row of other lengths. Printed: resident
memory of each rank after a quarter of the iterations and at the end; a growth of more than a tenth is an error.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
ITERATION = re.compile(r"iteration +(\d+)/")
RANKS = 2
GROWTH = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("t5", "gpt"), required=True)
    parser.add_argument("--data", type=Path, default=ROOT / ".demo" / "data")
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    quarter = options.iterations // 4
    with tempfile.TemporaryDirectory() as report:
        found = train(options, Path(report), {quarter, options.iterations - 1})
    early, late = found[quarter], found[options.iterations - 1]
    for rank, (before, after) in enumerate(zip(early, late, strict=True)):
        print(f"rank {rank}: {before:,.0f} MB after {quarter} iterations, {after:,.0f} MB at the end")
    if any(after > GROWTH * before for before, after in zip(early, late, strict=True)):
        sys.exit(f"memory has grown by more than {GROWTH - 1:.0%}")


def train(options: argparse.Namespace, report: Path, wanted: set[int]) -> dict[int, list[float]]:
    """Resident MB of every rank when the log says that one of these iterations has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / f"pretrain_{options.model}_multitask.py")]
    command += ["--dynapipe-config", str(ROOT / f"configs/demo_{options.model}.yaml")]
    command += [
        "--dynapipe-data",
        str(options.data),
        "--dynapipe-layout",
        "packed",
        "--dynapipe-report-dir",
        str(report),
    ]
    command += ["--dynapipe-calibrate", "0", "--global-batch-size", "16", "--train-iters", str(options.iterations)]
    command += ["--lr-decay-iters", str(options.iterations), "--eval-iters", "0"]
    found: dict[int, list[float]] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        tail: list[str] = []
        for line in process.stdout:
            tail = [*tail[-30:], line]
            if (seen := ITERATION.search(line)) and int(seen[1]) in wanted:
                found[int(seen[1])] = resident_mb(process.pid)
    if process.returncode or found.keys() != wanted:
        sys.exit(f"the run ended with {process.returncode}:\n{''.join(tail)}")
    return found


def resident_mb(launcher: int) -> list[float]:
    """Of the launcher's ranks, by their local rank."""
    ranks = {}
    for process in psutil.Process(launcher).children():
        if (rank := process.environ().get("LOCAL_RANK")) is not None:
            ranks[int(rank)] = process.memory_info().rss / 1e6
    return [ranks[rank] for rank in sorted(ranks)]


if __name__ == "__main__":
    main()
