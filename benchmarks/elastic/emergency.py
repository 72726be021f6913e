"""What checkpoints against losses without notice cost: training with one every N iterations against training with none.

    python benchmarks/elastic/emergency.py --data .demo/data [--models gpt,t5] [--every 50] [--pairs 5] [--json FILE]

One job of `megatron-dynapipe launch` for each model and way to save, on this machine's CPU. It saves every 2 N
iterations, so that stretches of N iterations with a save in their middle alternate with stretches of N without:

    iterations   N/2 ─────── 3 N/2 ─────── 5 N/2 ─────── 7 N/2 …        (a save at 2 N, 4 N, …)
                     without        with         without

Printed: the ratio of the time with to the mean of the two times without around it, with its 95% interval over the pairs
(Student's t); what a save takes beyond an iteration, and its size. `--async-save` goes on writing during the iterations
after it, which are among those with. Five pairs of two tiny models take a few minutes.

`--by-default N` trains N iterations of each model at the interval that `launch` finds by itself instead, and prints
what share of the time saves have from the second one on: the iterations after them, less the median of all others.
"""

import argparse
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, median, stdev

from nodes import ROOT, SMALL, TRAINING, lines_of

WAYS = {"sync": (), "async": ("--async-save",)}
# Two-sided 95% quantiles of Student's t by degrees of freedom; 1.96 beyond.
QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
SAVED = re.compile(r"saving checkpoint at iteration +(\d+) to \S*non_persistent")
HEAD = "| model | save | pairs | iteration, ms | a save, ms | size, MB | ratio low | ratio | ratio high |"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What was found of one job.

    Attributes:
        iteration_ms: median of all iterations.
        save_ms: median over the saves of the iteration after it, less `iteration_ms`.
        size_mb: of a checkpoint.
        ratio: low, value, high.
    """

    model: str
    save: str
    pairs: int
    iteration_ms: float
    save_ms: float
    size_mb: float
    ratio: tuple[float, float, float]

    def line(self) -> str:
        cells = [self.model, self.save, self.pairs, f"{self.iteration_ms:.1f}", f"{self.save_ms:.0f}"]
        cells += [f"{self.size_mb:.1f}", *(f"{value:.4f}" for value in self.ratio)]
        return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--models", default="gpt,t5", help="among gpt and t5 (%(default)s)")
    parser.add_argument("--saves", default="sync,async", help="among sync and async (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="iterations between saves, an even number (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="stretches with a save in each job (%(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="all jobs together may take (%(default)s)")
    parser.add_argument("--by-default", type=int, metavar="N", help="train N iterations at the interval that is found")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.by_default is not None:
        return by_default(options)
    jobs = [(model, save) for model in options.models.split(",") for save in options.saves.split(",")]
    print(f"{HEAD}\n{'|---' * (HEAD.count('|') - 1)}|", flush=True)
    costs = []
    for model, save in jobs:
        costs.append(measure(options, model, save, deadline_s=options.seconds / len(jobs)))
        print(costs[-1].line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return 0


def by_default(options: argparse.Namespace) -> int:
    """Print what saving costs at the interval that `launch` finds."""
    models, found = options.models.split(","), []
    print("| model | iterations | saved after | a save, ms | share |\n|---|---|---|---|---|", flush=True)
    for model in models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            train(options, model, (), folder, options.by_default, options.seconds / len(models), every=None)
            at = {line.number: datetime.fromisoformat(line.time).timestamp() for line in lines_of(folder / "log")}
            saves = [int(number) for number in SAVED.findall((folder / "log").read_text())]
        saves = sorted(number for number in set(saves) if number + 1 in at)
        if len(saves) < 3:
            raise SystemExit(f"expected three saves within {options.by_default} iterations, got {saves}: train more")
        save_ms, share = share_of(at, saves[1:])
        row = {"model": model, "iterations": len(at), "saves": saves, "save_ms": save_ms, "share": share}
        cells = [model, len(at), ", ".join(map(str, saves)), f"{save_ms:.0f}", f"{share:.2%}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        found.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def share_of(at: dict[int, float], saves: list[int]) -> tuple[float, float]:
    """A save's median time in ms, and the share of the time from before the first of `saves` to before the one after.

    From the iteration after which the first is made until the last iteration before the next would be due.
    """
    apart = saves[-1] - saves[-2] if len(saves) > 1 else saves[0]
    last = max(number for number in at if number <= saves[-1] + apart)
    each = {number: at[number] - at[number - 1] for number in range(saves[0] + 1, last + 1)}
    after = [number + 1 for number in saves]
    without = median(seconds for number, seconds in each.items() if number not in after)
    costs = [each[number] - without for number in after]
    return median(costs) * 1000, sum(costs) / sum(each.values())


def measure(options: argparse.Namespace, model: str, save: str, *, deadline_s: float) -> Cost:
    """Train one job, and compare its stretches."""
    every, pairs = options.every, options.pairs
    last = 2 * every * pairs + 3 * every // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(options, model, WAYS[save], folder, last, deadline_s, every=2 * every)
        at = {line.number: datetime.fromisoformat(line.time).timestamp() for line in lines_of(folder / "log")}
        saved = folder / "saved" / "non_persistent" / f"iter_{2 * every * pairs:07d}"
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    if not size or any(number not in at for number in range(every // 2, last + 1)):
        raise SystemExit(f"expected {last} iterations and a checkpoint {saved.name}, got {len(at)} and {size} bytes")
    each = {number: (at[number] - at[number - 1]) * 1000 for number in at if number - 1 in at}
    saves = [2 * every * (pair + 1) for pair in range(pairs)]
    iteration_ms = median(each.values())
    return Cost(
        model=model,
        save=save,
        pairs=pairs,
        iteration_ms=iteration_ms,
        save_ms=median(each[number + 1] for number in saves) - iteration_ms,
        size_mb=size / 1e6,
        ratio=interval([ratio(at, number, every) for number in saves]),
    )


def ratio(at: dict[int, float], save: int, every: int) -> float:
    """Time of the stretch around a save, over the mean of those before and after it."""

    def took(first: int) -> float:
        return at[first + every] - at[first]

    middle = save - every // 2
    return took(middle) / ((took(middle - every) + took(middle + every)) / 2)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Mean of some ratios between its 95% bounds; of one alone, there are none."""
    value, others = mean(ratios), len(ratios) - 1
    if not others:
        return math.nan, value, math.nan
    width = (QUANTILES[others - 1] if others <= len(QUANTILES) else 1.96) * stdev(ratios) / math.sqrt(len(ratios))
    return value - width, value, value + width


def train(
    options: argparse.Namespace,
    model: str,
    more: tuple[str, ...],
    folder: Path,
    last: int,
    deadline_s: float,
    *,
    every: int | None,
) -> None:
    """One job; its log is FOLDER/log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [sys.executable, "-m", "megatron_dynapipe", "launch", "--nproc-per-node", str(options.ranks)]
    words += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    words += [] if every is None else ["--emergency-every", str(every)]
    words += [f"pretrain_{model}_multitask.py", *SMALL[model].split(), *TRAINING.split()]
    words += ["--dynapipe-data", str(options.data), "--dynapipe-report-dir", str(folder / "report")]
    words += ["--save", str(folder / "saved"), "--exit-interval", str(last), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        status = job.wait(deadline_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # its ranks finish an iteration, save and end
        job.wait()
        raise SystemExit(f"expected {last} iterations of {model} within {deadline_s:.0f} s; fewer --pairs?") from None
    if status:
        raise SystemExit(f"expected the job to end well, got status {status}:\n{(folder / 'log').read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
