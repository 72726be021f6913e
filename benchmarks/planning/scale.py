"""How long one large batch takes to plan, with everything on, and how much memory.

    python -m benchmarks.planning.scale [--samples 100000] [--settings gpt:1,1,8 t5:1,1,8] [--split equal]
    python -m benchmarks.planning.scale --rows [GPUs samples stages positions]

The samples are those of the recorded batches of 2,048 positions, again and again. Costs, memory and links are those of
`full.py`; packed rows, pieces, divided backward passes and half layers are on; an auto split is chosen from the
larger batches, before the plan and apart from it. One process on one core for each setting; memory is that of the whole
process at its peak.

`--rows` plans on H100s, by name: 4,096 GPUs; 100,000 samples on one replica; 64 layers on 8 to 64 stages; samples
of 131,072 and 1,048,576 positions in pieces. "Of limit" is what all devices take at least for the samples
(`limits.py`), over the predicted time.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import environment, markdown
from benchmarks.planning.cases import recorded_batches
from benchmarks.planning.full import answer, arguments, write
from benchmarks.planning.stage_work import StageWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli.batch_arguments import chosen_batches
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.cli.planning_arguments import costs_and_settings

LONGEST = 2048
OF_ONE_REPLICA = 262_144
COLUMNS = ("batch", "GPUs", "positions", "processor s", "peak GB so far", "predicted ms", "of limit")
EIGHT_STAGES = ("--layers-per-stage", "4.5,4.5,4.5,4.5,4.5,4,4,1.5")
FAST_LINKS = ("--inter-node-gbps", "400", "--inter-node-latency-us", "20")


class Row(NamedTuple):
    """A batch that is planned in one process."""

    name: str
    setting: str
    lengths: list[int]
    words: tuple[str, ...] = FAST_LINKS
    labels: list[int] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--settings", nargs="*", default=("gpt:1,1,8", "t5:1,1,8"), help="model:data,tensor,pipeline")
    parser.add_argument("--split", choices=("auto", "equal"), default="auto", help="layers per stage (%(default)s)")
    parser.add_argument("--rows", nargs="*", help="parts of rows' names; all without any")
    args = parser.parse_args()
    every = recorded_batches()
    if args.rows is not None:
        print(markdown(COLUMNS, []), flush=True)
        for row in _rows(every):
            if not args.rows or any(part in row.name for part in args.rows):
                print(f"| {' | '.join(_cells(row))} |", flush=True)
        return
    for setting in args.settings:
        seconds, processor, rest, most = _planned(setting, args.samples, every, args.split)
        print(
            f"{setting}: {args.samples:,} samples in {seconds:.1f} s, {processor:.1f} s of processor time; layer"
            f" split and start {rest:.1f} s of processor time; peak memory of the processes so far {most:.2f} GB",
            flush=True,
        )


def _rows(every: list[dict]) -> Iterator[Row]:
    own = [n for batch in every if (batch["model"], batch["max_seq_len"]) == ("gpt", LONGEST) for n in batch["input"]]
    endless = list(itertools.islice(itertools.cycle(own), 100_000))
    ends = list(itertools.accumulate(endless))

    def of(positions: int) -> list[int]:
        return endless[: sum(end <= positions for end in ends)]

    yield Row("4,096 GPUs, 256·2·8", "gpt:256,2,8", of(256 * 16_384), (*EIGHT_STAGES, *FAST_LINKS))
    yield Row("100,000 samples, 1·1·8", "gpt:1,1,8", endless, EIGHT_STAGES)
    for stages in (8, 16, 32, 64):
        words = ("--layers", "64", "--layer-split", "equal", *FAST_LINKS)
        yield Row(f"64 layers, {stages} stages", f"gpt:1,1,{stages}", of(OF_ONE_REPLICA), words)
    halves = [131_072 >> n for n in range(8) for _ in range(min(n, 2) + 1)]
    for setting in ("1,1,8", "1,2,4"):
        yield Row(f"131,072 positions, {setting}", f"gpt-llama-8b:{setting}", halves, ("--layers-per-stage", "auto"))
    few = [length // 64 for length in halves]
    yield Row("131,072 positions, 1,1,8, a 64th counts", "gpt-llama-8b:1,1,8", halves, labels=few)
    yield Row("1,048,576 positions, 1,8,8, a 64th counts", "gpt-llama-8b:1,8,8", [2**20], labels=[2**14])


def _cells(row: Row) -> list[str]:
    model, _, layout = row.setting.partition(":")
    gpus = 1
    for size in layout.split(","):
        gpus *= int(size)
    labels = {} if row.labels is None else {"labels": row.labels}
    cells = [row.name, f"{gpus:,}", f"{sum(row.lengths):,}"]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "batches.json"
        write(path, [{"id": "large", "input": row.lengths, **labels}])
        words = [*arguments("plan", model, layout, path, "h100"), *row.words]
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment())
        if done.returncode == 2:
            return [*cells, f"no plan: {done.stderr.splitlines()[0]}", "", "", ""]
        (iteration,) = json.loads(done.stdout)["iterations"]
        if iteration["error"]:
            return [*cells, f"no plan: {iteration['error']}", "", "", ""]
        args = build_parser("plan").parse_args([*words[3:], "--layer-split", "equal"])  # the limit is that of any split
        cost_model, settings = costs_and_settings(args)
        planner = planner_of(settings, cost_model)
        work = StageWork(planner, planner.samples(chosen_batches(args)[0].global_batch(0)))
    predicted, least = iteration["predicted_ms"], work.everywhere(work.time) / 1e6
    planned = iteration["planning_processor_seconds"]
    return [*cells, f"{planned:.2f}", f"{_most_gb():.2f}", f"{predicted:,.1f}", f"{least / predicted:.3f}"]


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
    return iteration["planning_seconds"]["total"], planned, _processor_seconds() - before - planned, _most_gb()


def _most_gb() -> float:
    """Of the largest child process so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9


def _processor_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
