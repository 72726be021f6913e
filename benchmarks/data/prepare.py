"""How fast `data prepare` tokenises, on one core and on two, and how much memory it takes.

    python benchmarks/data/prepare.py ROWS.jsonl[.gz] [--tokenizer DIR] [--parts library,cores,memory] [--rounds 3]
        [--library-megabytes 20] [--cores-megabytes 100] [--memory-megabytes 1000]

library  rates per CPU second against the tokenizer library's own batch encoding of the same text, in turns
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
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
FEW_MEGABYTES = 5


class Text:
    """Rows of a file, repeated up to any size.

    Args:
        source: the file.
        folder: where sized copies go.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as file:
            lines = (line.strip() for line in file)
            self._lines = [
                line for line in lines if all(json.loads(line)[name] for name in ("task", "input", "target"))
            ]
        self._folder = folder

    def rows(self, megabytes: int) -> Iterator[bytes]:
        left = megabytes * 10**6
        for line in itertools.cycle(self._lines):
            yield line
            left -= len(line) + 1
            if left <= 0:
                return

    def file(self, megabytes: int) -> Path:
        path = self._folder / f"rows-{megabytes}.jsonl"
        if not path.exists():
            with path.open("wb") as file:
                file.writelines(line + b"\n" for line in self.rows(megabytes))
        return path

    def texts(self, megabytes: int) -> list[str]:
        made = map(json.loads, self.rows(megabytes))
        return [row[name] for row in made for name in ("input", "target")]


def command(rows: Path, tokenizer: Path | None, output: Path, workers: int | None = None) -> list[str]:
    """The command, with nothing left at its output by an earlier one."""
    shutil.rmtree(output, ignore_errors=True)
    words = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", str(rows), "--output", str(output)]
    words += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    return words + ([] if workers is None else ["--workers", str(workers)])


def compare_with_library(text: Text, megabytes: int, tokenizer: Path, output: Path) -> tuple[float, float]:
    """(MB of text per CPU second of the library, of `data prepare` without what does not grow with the text)."""
    texts, few = text.texts(megabytes), text.texts(FEW_MEGABYTES)
    size, small = (sum(len(each.encode()) for each in part) / 1e6 for part in (texts, few))
    theirs = library_cpu_s(texts, tokenizer)
    ours = [cpu_s(command(text.file(part), tokenizer, output, workers=1)) for part in (FEW_MEGABYTES, megabytes)]
    return size / theirs, (size - small) / (ours[1] - ours[0])


def library_cpu_s(texts: list[str], tokenizer: Path) -> float:
    """CPU seconds of `encode_batch` in pieces of a thousand, ids taken out."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    started = time.process_time()
    for first in range(0, len(texts), 1000):
        _ = [each.ids for each in encoder.encode_batch(texts[first : first + 1000], add_special_tokens=False)]
    return time.process_time() - started


def cpu_s(words: list[str]) -> float:
    """CPU seconds of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, **QUIET)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def wall_s(words: list[str], cores: set[int]) -> float:
    """Seconds of a command that may use these cores; it takes a worker for each."""
    started = time.perf_counter()
    subprocess.run(words, check=True, preexec_fn=lambda: os.sched_setaffinity(0, cores), **QUIET)
    return time.perf_counter() - started


def most_memory(words: list[str]) -> int:
    """Megabytes of the process and all it starts together, at their most, mapped files included; looked at often."""
    most = 0
    with subprocess.Popen(words, **QUIET) as process:
        while process.poll() is None:
            most = max(most, sum(map(resident_kb, tree(process.pid))))
            time.sleep(0.1)
    if process.returncode:
        sys.exit(f"`data prepare` ended with {process.returncode}")
    return most * 1024 // 10**6


def tree(pid: int) -> list[int]:
    try:
        tasks = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [pid, *(each for children in tasks for child in children.split() for each in tree(int(child)))]


def resident_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def say(line: str) -> None:
    """One line, with how busy the machine is."""
    print(f"{line} (load {os.getloadavg()[0]:.1f})", flush=True)


def library(text: Text, tokenizer: Path, output: Path, args: argparse.Namespace) -> None:
    ratios = []
    for _ in range(args.rounds):
        theirs, ours = compare_with_library(text, args.library_megabytes, tokenizer, output)
        ratios.append(ours / theirs)
        say(f"library {theirs:.2f} MB/s, prepare {ours:.2f} MB/s per core: {ratios[-1]:.2f}")
    say(f"library, {args.library_megabytes} MB: median {statistics.median(ratios):.2f} times its rate")


def cores(text: Text, tokenizer: Path, output: Path, args: argparse.Namespace) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    if len(two) < 2:
        sys.exit("this machine has one core")
    rows, ratios = text.file(args.cores_megabytes), []
    for _ in range(args.rounds):
        alone, both = (wall_s(command(rows, tokenizer, output), set(each)) for each in (two[:1], two))
        ratios.append(alone / both)
        say(f"one core {alone:.1f} s, two {both:.1f} s: {ratios[-1]:.2f}")
    say(f"two cores, {args.cores_megabytes} MB: median {statistics.median(ratios):.2f} times as fast as one")


def memory(text: Text, tokenizer: Path, output: Path, args: argparse.Namespace) -> None:
    rows = text.file(args.memory_megabytes)
    most = most_memory(command(rows, tokenizer, output, workers=2))
    say(f"memory, {args.memory_megabytes} MB of rows: at most {most} MB in all processes together")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--parts", default="library,cores,memory")
    parser.add_argument("--rounds", type=int, default=3)
    for part, size in (("library", 20), ("cores", 100), ("memory", 1000)):
        parser.add_argument(f"--{part}-megabytes", type=int, default=size)
    args = parser.parse_args()
    parts = {"library": library, "cores": cores, "memory": memory}
    if unknown := set(args.parts.split(",")) - set(parts):
        parser.error(f"expected parts of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = Text(args.rows, folder), args.tokenizer
        if tokenizer is None:
            subprocess.run(command(text.file(FEW_MEGABYTES), None, folder / "trained"), check=True, **QUIET)
            tokenizer = folder / "trained" / "tokenizer"
        for part in args.parts.split(","):
            parts[part](text, tokenizer, folder / "data", args)


if __name__ == "__main__":
    main()
