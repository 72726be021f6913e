"""How long a sampler of very many samples takes to start, and how much memory it takes.

    python benchmarks/data/start.py [--samples 100000000] [--tasks 1000] [--json FILE]

Writes the index of a split of so many samples into a temporary folder (2.8 GB for 100 million; its text is a file with
a hole), sorted by task as `data prepare` writes most mixtures. Then, each in a process of its own: reading and checking
the index, the sampler, the first batch and the ten-thousandth one, without rates, with rates by task, and by tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

AT_ONCE = 2**20
CASES = ("plain", "rates", "tokens")


def write(folder: Path, samples: int, tasks: int) -> None:
    """The split's index and tasks; its tokens are a hole as long as they would be."""
    from megatron_dynapipe.data.indexed import write_index
    from megatron_dynapipe.sampling.lengths import data_path, task_ids_path

    def lengths() -> Iterator[Any]:
        for first in range(0, samples, AT_ONCE):
            count = min(AT_ONCE, samples - first)
            yield np.random.default_rng(first).integers(1, 500, 2 * count, dtype=np.int32)

    prefix = folder / "train"
    write_index(prefix, np.dtype("<u2"), samples, lengths)
    with data_path(prefix).open("wb") as file:
        file.truncate(2 * sum(int(part.sum()) for part in lengths()))
    ids = np.lib.format.open_memmap(task_ids_path(folder, "train"), "w+", np.dtype(np.int16), (samples,))
    for first in range(0, samples, AT_ONCE):
        place = np.arange(first, min(first + AT_ONCE, samples))
        ids[first : first + AT_ONCE] = place * tasks // samples
    ids.flush()


def start(folder: Path, case: str, tasks: int) -> dict[str, float]:
    """Seconds until the first batch, of the first and of a later batch, and this process's memory of its own."""
    from megatron_dynapipe.sampling import SamplerSettings
    from megatron_dynapipe.service.loop import split_sampler
    from megatron_dynapipe.service.settings import SplitSettings
    from megatron_dynapipe.units import ModelFamily

    settings = SamplerSettings(
        family=ModelFamily.GPT,
        seed=1,
        samples_per_iteration=1024,
        max_input_length=1024,
        task_rates=tuple(1.0 + task % 7 for task in range(tasks)) if case == "rates" else (),
        tokens_per_iteration=2**19 if case == "tokens" else None,
    )
    before = memory_mb()
    began, spent = time.perf_counter(), time.process_time()
    sampler = split_sampler(folder, SplitSettings(name="train", sampler=settings))
    made = time.perf_counter()
    first = sampler.batch(0)
    drawn, used = time.perf_counter(), time.process_time()
    sampler.batch(10_000)
    later = time.perf_counter()
    assert len(first) > 0
    return {
        "start_s": round(drawn - began, 2),
        "start_cpu_s": round(used - spent, 2),
        "first_batch_ms": round(1e3 * (drawn - made), 1),
        "batch_10000_cpu_ms": round(1e3 * (time.process_time() - used), 1),
        "batch_10000_ms": round(1e3 * (later - drawn), 1),
        "own_memory_mb": round(memory_mb() - before),
        "peak_mb_with_mapped_files": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
    }


def memory_mb() -> float:
    """Memory that is this process's alone: mapped files, whose pages the system may take back, are not in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(start(args.folder, args.case, args.tasks)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.samples, args.tasks)
        for case in CASES:
            words = [sys.executable, __file__, "--case", case, "--folder", folder, "--tasks", str(args.tasks)]
            found[case] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
            print(f"{args.samples} samples, {case}: {found[case]}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"samples": args.samples, "tasks": args.tasks, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
