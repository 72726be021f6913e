"""What checkpoints against losses without notice cost: the iteration after each, compared with the others.

    python -m benchmarks.elastic.emergency --data DATASET [--models gpt,t5] [--saves sync,async] [--every 50]

One job of `megatron-dynapipe launch` for each model and way to save, on this machine's CPU. Printed: what an iteration
takes, what a save adds to the iteration after it (medians; the first save also loads and starts what it writes with,
and does not count), the share of the time that saving every `--every` iterations takes, and a checkpoint's size.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.common import markdown
from benchmarks.elastic.nodes import Job, lines_of, start_agent
from tests.store.servers import free_port

WAYS = {"sync": (), "async": ("--async-save",)}
SAVED = re.compile(r"saving checkpoint at iteration +(\d+) to \S*non_persistent")
COLUMNS = ("model", "save", "saves", "iteration, ms", "a save, ms", "share", "size, MB")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What was found of one job.

    Attributes:
        iteration_ms: median of all iterations.
        save_ms: median over the saves of the iteration after it, less `iteration_ms`.
        share: of the time, that saving takes.
        size_mb: of a checkpoint.
    """

    model: str
    save: str
    saves: int
    iteration_ms: float
    save_ms: float
    share: float
    size_mb: float

    def line(self) -> str:
        cells = [self.model, self.save, self.saves, f"{self.iteration_ms:.1f}", f"{self.save_ms:.0f}"]
        cells += [f"{self.share:.2%}", f"{self.size_mb:.1f}"]
        return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--models", default="gpt,t5", help="among gpt and t5 (%(default)s)")
    parser.add_argument("--saves", default="sync,async", help="among sync and async (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="iterations between saves (%(default)s)")
    parser.add_argument("--count", type=int, default=6, help="saves in each job (%(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="a job may take (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(markdown(COLUMNS, []), flush=True)
    costs = []
    for model in options.models.split(","):
        for save in options.saves.split(","):
            costs.append(measure(options, model, save))
            print(costs[-1].line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace, model: str, save: str) -> Cost:
    """Train one job."""
    last = options.every * options.count + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(model=model, data=options.data, nodes=1, every=options.every)
        flags = ["--nproc-per-node", str(options.ranks), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        flags += ["--emergency-every", str(options.every)]
        agent = start_agent(job, folder, folder / "log", flags, [*WAYS[save], "--exit-interval", str(last)])
        try:
            status = agent.wait(options.seconds)
        except subprocess.TimeoutExpired:
            agent.terminate()  # its ranks finish an iteration, save and end
            agent.wait()
            raise SystemExit(f"expected {last} iterations of {model} within {options.seconds:.0f} s") from None
        log = (folder / "log").read_text()
        saved = folder / "saved" / "non_persistent" / f"iter_{last - 1:07d}"
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    at = {line.number: line.ended() for line in lines_of(log)}
    saves = sorted({int(number) for number in SAVED.findall(log)} & {number - 1 for number in at})[1:]
    if status or not size or not saves:
        raise SystemExit(f"expected {last} iterations and {options.count} saves, got status {status}:\n{log[-2000:]}")
    return cost_of(at, saves, options.every, model=model, save=save, size_mb=size / 1e6)


def cost_of(at: dict[int, float], saves: list[int], every: int, *, model: str, save: str, size_mb: float) -> Cost:
    """From when iterations ended, by number, and those after which a checkpoint was saved."""
    took = {number: at[number] - at[number - 1] for number in at if number - 1 in at}
    usual = median(seconds for number, seconds in took.items() if number - 1 not in saves)
    added = median(took[number + 1] - usual for number in saves)
    return Cost(
        model=model,
        save=save,
        saves=len(saves),
        iteration_ms=usual * 1000,
        save_ms=added * 1000,
        share=added / (every * usual + added),
        size_mb=size_mb,
    )


if __name__ == "__main__":
    sys.exit(main())
