"""How fast `data prepare` tokenises, against the tokenizer library's own batch encoding of the same text, in turns.

    python benchmarks/data/prepare.py ROWS.jsonl[.gz] --tokenizer DIR [--rounds 5] [--megabytes 20]
        [--memory-megabytes 0]

Prints rates per CPU second of both and their ratio (prepare over library; above 1: faster), and one worker's wall clock
over two. With --memory-megabytes N also the most memory of all processes while they make a dataset of so much text.
"""

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def read_rows(path: Path, most_bytes: int) -> bytes:
    """Lines of the file, again and again, up to about as many bytes."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = [line for line in file if all(json.loads(line)[name] for name in ("task", "input", "target"))]
    made, size, at = [], 0, 0
    while size < most_bytes:
        made.append(lines[at % len(lines)].rstrip(b"\n"))
        size += len(made[-1]) + 1
        at += 1
    return b"\n".join(made) + b"\n"


def text_megabytes(rows: list[dict[str, str]]) -> float:
    return sum(len(row[name].encode()) for row in rows for name in ("input", "target")) / 1e6


def prepare(rows: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, float]:
    """(CPU seconds of all processes, wall seconds) of making the dataset, all included."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command(rows, tokenizer, output, workers), check=True, **QUIET)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - started


def command(rows: Path, tokenizer: Path, output: Path, workers: int) -> list[str]:
    shutil.rmtree(output, ignore_errors=True)
    words = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", str(rows), "--output", str(output)]
    return [*words, "--tokenizer", str(tokenizer), "--workers", str(workers)]


def most_memory(words: list[str]) -> int:
    """Megabytes of the process and all it starts together, at their most, mapped files included; looked at often."""
    most = 0
    with subprocess.Popen(words, **QUIET) as process:
        while process.poll() is None:
            most = max(most, sum(map(resident_kb, tree(process.pid))))
            time.sleep(0.1)
    return most // 1000


def tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in tree(int(child)))]


def resident_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def library(texts: list[str], tokenizer: Path) -> float:
    """CPU seconds of `encode_batch` in pieces of a thousand, ids taken out."""
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    started = time.process_time()
    for first in range(0, len(texts), 1000):
        _ = [each.ids for each in encoder.encode_batch(texts[first : first + 1000], add_special_tokens=False)]
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--memory-megabytes", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, output = Path(folder) / "rows.jsonl", Path(folder) / "data"
        rows.write_bytes(read_rows(args.rows, args.megabytes * 10**6))
        made = [json.loads(line) for line in rows.read_bytes().splitlines()]
        texts = [text for row in made for text in (row["input"], row["target"])]
        megabytes = text_megabytes(made)
        few = Path(folder) / "few.jsonl"
        few.write_bytes(read_rows(args.rows, 5_000_000))
        few_megabytes = text_megabytes([json.loads(line) for line in few.read_bytes().splitlines()])
        ratios, walls = [], []
        for _ in range(args.rounds):
            theirs = library(texts, args.tokenizer) / megabytes
            small, large = (prepare(each, args.tokenizer, output, 1) for each in (few, rows))
            ours = (large[0] - small[0]) / (megabytes - few_megabytes)  # without what does not grow with the text
            two = prepare(rows, args.tokenizer, output, 2)
            ratios.append(theirs / ours)
            walls.append(large[1] / two[1])
            rates = f"library {1 / theirs:.2f} MB/s, prepare {1 / ours:.2f} MB/s per core"
            print(f"{rates}: {ratios[-1]:.2f}; two workers {walls[-1]:.2f}x", flush=True)
        medians = statistics.median(ratios), statistics.median(walls)
        print(f"{megabytes:.0f} MB: median ratio {medians[0]:.2f}, two workers {medians[1]:.2f}x", flush=True)
        if args.memory_megabytes:
            rows.write_bytes(read_rows(args.rows, args.memory_megabytes * 10**6))
            most = most_memory(command(rows, args.tokenizer, output, 2))
            print(f"{args.memory_megabytes} MB of rows: at most {most} MB in all processes together")


if __name__ == "__main__":
    main()
