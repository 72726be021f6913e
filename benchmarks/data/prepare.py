"""How fast `data prepare` tokenises, against the tokenizer library's own batch encoding of the same text, in turns.

    python benchmarks/data/prepare.py ROWS.jsonl[.gz] --tokenizer DIR [--rounds 5] [--megabytes 20]
        [--memory-megabytes 0]

Prints rates per CPU second of both and their ratio (prepare over library; above 1: faster), and one worker's wall clock
over two. With --memory-megabytes N also the most memory of any process while it makes a dataset of so much text.
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

os.environ["TOKENIZERS_PARALLELISM"] = "false"


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


def prepare(rows: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, float, int]:
    """(CPU seconds of all processes, wall seconds, bytes of the largest) of making the dataset, all included."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", str(rows), "--output", str(output)]
    command += ["--tokenizer", str(tokenizer), "--workers", str(workers)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - started, after.ru_maxrss * 1024


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
            _, seconds, most = prepare(rows, args.tokenizer, output, 2)
            print(f"{args.memory_megabytes} MB of rows: {most / 1e6:.0f} MB in the largest process, {seconds:.0f} s")


if __name__ == "__main__":
    main()
