"""How long `data prepare` takes, and the most that all its processes together have resident.

    [taskset -c 0] python benchmarks/data/prepare.py ROWS.jsonl[.gz] [--tokenizer DIR] [--megabytes 1000] [--chats N]

ROWS has task, input and target; it is repeated up to the size that is asked for, in a temporary folder. Without
--tokenizer one is trained on it first. With --chats it is made into so many conversations of two turns instead, by a
template that this file has. There is a worker for each core that this process may use.
"""

import argparse
import gzip
import itertools
import json
import os
import resource
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
MIXTURE = """tasks:
  - {name: chats, source: chats.jsonl, messages: messages}
chat_template: "{% for m in messages %}<s>{{ m.role }}\\n{{ m.content }}</s>\\n{% endfor %}\
{% if add_generation_prompt %}<s>assistant\\n{% endif %}"
"""


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


def chats(rows: Path, folder: Path, count: int) -> Path:
    """A mixture file of so many conversations of two turns, made of a file's rows."""
    with rows.open() as file:
        pairs = itertools.cycle([json.loads(line) for line in file])
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(count):
            turns = [turn for pair in itertools.islice(pairs, 2) for turn in (pair["input"], pair["target"])]
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "chats.yaml").write_text(MIXTURE)
    return folder / "chats.yaml"


def command(rows: Path, tokenizer: Path | None, output: Path) -> list[str]:
    source = ["--mixture", str(rows)] if rows.suffix == ".yaml" else [str(rows)]
    words = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", *source, "--output", str(output)]
    return words + ([] if tokenizer is None else ["--tokenizer", str(tokenizer)])


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


def processor_s() -> float:
    """Seconds of processor time of all processes that have ended and that this one started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000, help="of rows (%(default)s)")
    parser.add_argument("--chats", type=int, metavar="N", help="conversations, in place of rows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), args.tokenizer
        if tokenizer is None:
            few = repeated(args.rows, folder, FEW_MEGABYTES)
            subprocess.run(command(few, None, folder / "trained"), check=True, **QUIET)
            tokenizer = folder / "trained" / "tokenizer"
        rows, what = repeated(args.rows, folder, args.megabytes), f"{args.megabytes} MB of rows"
        if args.chats is not None:
            rows, what = chats(rows, folder, args.chats), f"{args.chats} conversations"
        before, began = processor_s(), time.perf_counter()
        most = most_memory(command(rows, tokenizer, folder / "data"))
        seconds, load, worked = time.perf_counter() - began, os.getloadavg()[0], processor_s() - before
        took = f"{seconds:.1f} s, {worked:.1f} s of processor time"
        print(f"{what}: {took}, at most {most} MB in all processes (load {load:.1f})")


if __name__ == "__main__":
    main()
