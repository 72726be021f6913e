"""How much faster two cores make `data prepare`, and how much memory it takes.

    python benchmarks/data/prepare.py ROWS.jsonl[.gz] [--tokenizer DIR] [--rounds 3]
        [--cores-megabytes 100] [--memory-megabytes 1000]

cores    wall clock held to one core over that on two, in turns; the start of Python is part of both
memory   the most that all processes together have resident while they make a dataset of so much text

ROWS has task, input and target; it is repeated up to the sizes that are asked for, in a temporary folder. Without
--tokenizer one is trained on it first.
"""

import argparse
import gzip
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

os.environ["TOKENIZERS_PARALLELISM"] = "false"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
FEW_MEGABYTES = 5


def repeated(source: Path, folder: Path, megabytes: int) -> Path:
    """A file's rows again and again, up to a size."""
    with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as file:
        rows = [line.strip() for line in file if all(json.loads(line)[name] for name in ("task", "input", "target"))]
    path, left = folder / f"rows-{megabytes}.jsonl", megabytes * 10**6
    with path.open("wb") as file:
        for row in itertools.cycle(rows):
            left -= file.write(row + b"\n")
            if left <= 0:
                return path


def command(rows: Path, tokenizer: Path | None, output: Path, workers: int | None = None) -> list[str]:
    """The command, with nothing left at its output by an earlier one."""
    shutil.rmtree(output, ignore_errors=True)
    words = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", str(rows), "--output", str(output)]
    words += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    return words + ([] if workers is None else ["--workers", str(workers)])


def wall_s(words: list[str], cores: set[int]) -> float:
    """Seconds of a command that may use these cores; it takes a worker for each."""
    started = time.perf_counter()
    subprocess.run(words, check=True, preexec_fn=lambda: os.sched_setaffinity(0, cores), **QUIET)
    return time.perf_counter() - started


def most_memory(words: list[str]) -> int:
    """Megabytes of the process and all it starts together, at their most, mapped files included; looked at often."""
    most = 0
    with psutil.Popen(words, **QUIET) as process:
        while process.poll() is None:
            most = max(most, resident(process))
            time.sleep(0.1)
    if process.returncode:
        sys.exit(f"`data prepare` ended with {process.returncode}")
    return most // 10**6


def resident(process: psutil.Process) -> int:
    """Bytes of a process and all it has started, as far as they are still there."""
    found = 0
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                found += each.memory_info().rss
    return found


def say(line: str) -> None:
    """One line, with how busy the machine is."""
    print(f"{line} (load {os.getloadavg()[0]:.1f})", flush=True)


def cores(rows: Path, tokenizer: Path, output: Path, rounds: int) -> None:
    two, ratios = sorted(os.sched_getaffinity(0))[:2], []
    if len(two) < 2:
        sys.exit("this machine has one core")
    for _ in range(rounds):
        alone, both = (wall_s(command(rows, tokenizer, output), set(each)) for each in (two[:1], two))
        ratios.append(alone / both)
        say(f"one core {alone:.1f} s, two {both:.1f} s: {ratios[-1]:.2f}")
    say(f"two cores: median {statistics.median(ratios):.2f} times as fast as one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores-megabytes", type=int, default=100, help="(%(default)s; 0: not compared)")
    parser.add_argument("--memory-megabytes", type=int, default=1000, help="(%(default)s; 0: not measured)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), args.tokenizer
        if tokenizer is None:
            few = repeated(args.rows, folder, FEW_MEGABYTES)
            subprocess.run(command(few, None, folder / "trained"), check=True, **QUIET)
            tokenizer = folder / "trained" / "tokenizer"
        if args.cores_megabytes:
            cores(repeated(args.rows, folder, args.cores_megabytes), tokenizer, folder / "data", args.rounds)
        if args.memory_megabytes:
            rows = repeated(args.rows, folder, args.memory_megabytes)
            most = most_memory(command(rows, tokenizer, folder / "data", workers=2))
            say(f"{args.memory_megabytes} MB of rows: at most {most} MB in all processes together")


if __name__ == "__main__":
    main()
