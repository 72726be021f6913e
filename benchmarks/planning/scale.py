"""How long one large batch takes to plan, with everything on, and how much memory.

    python -m benchmarks.planning.scale [--samples 100000] [--settings gpt:1,1,8 t5:1,1,8] [--split equal]

The samples are those of the recorded batches of 2,048 positions, again and again. Costs, memory and links are those of
`full.py`; packed rows, pieces, divided backward passes and half layers are on; an auto split is chosen from the
larger batches, before the plan and apart from it. One process on one core for each setting; memory is that of the whole
process at its peak.
"""

import argparse
import itertools
import resource
import sys

from benchmarks.planning.cases import recorded_batches
from benchmarks.planning.full import answer

LONGEST = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--settings", nargs="*", default=("gpt:1,1,8", "t5:1,1,8"), help="model:data,tensor,pipeline")
    parser.add_argument("--split", choices=("auto", "equal"), default="auto", help="layers per stage (%(default)s)")
    args = parser.parse_args()
    every = recorded_batches()
    for setting in args.settings:
        seconds, processor, rest, most = _planned(setting, args.samples, every, args.split)
        print(
            f"{setting}: {args.samples:,} samples in {seconds:.1f} s, {processor:.1f} s of processor time; layer"
            f" split and start {rest:.1f} s of processor time; peak memory of the processes so far {most:.2f} GB",
            flush=True,
        )


def _planned(setting: str, samples: int, every: list[dict], split: str) -> tuple[float, ...]:
    """Seconds of wall-clock and of processor time for the plan, of processor time for the rest, and gigabytes of the
    largest process so far.
    """
    before, model = _processor_seconds(), setting.partition(":")[0]
    own = [batch for batch in every if batch["model"] == model and batch["max_seq_len"] == LONGEST]
    drawn = {
        key: list(itertools.islice(itertools.cycle(n for batch in own for n in batch[key]), samples))
        for key in ("input", "target")
        if key in own[0]
    }
    (iteration,) = answer("plan", setting, [{"id": "large", **drawn}], LONGEST, every, split=split)["iterations"]
    if iteration["error"]:
        sys.exit(iteration["error"])
    planned = iteration["planning_processor_seconds"]
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return iteration["planning_seconds"]["total"], planned, _processor_seconds() - before - planned, most


def _processor_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
