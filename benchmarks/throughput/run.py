"""Real training of the same samples by each way to make micro-batches, taking turns.

    python benchmarks/throughput/run.py [--quick] [--data DATASET] [--model t5|gpt] [--methods a,b,…] [--ranks 2]
        [--cost-model FILE] [--json FILE] [-- FLAGS of the runs, of Megatron or --dynapipe-…]

A job of processes per method stays up. For every global batch each job in turn trains it, in an order that rotates,
while the others wait without computing: whatever else the machine does slows all methods alike, and ratios are of one
batch at nearly one time. Baselines take 1F1B, an equal layer split, one recompute mode, and of all sizes of
micro-batches the one of least predicted time. Costs are measured first (`profile`), unless a file is given.

    tokens/s    real tokens, without padding, of all batches over their time
    ratio       the method's tokens/s over the planned runs', with a 95% interval (bootstrap over batches and rounds)
    idle        share of the time in which a stage computes nothing, mean of all stages
    memory      high-water mark of the largest process (CPU) or of the allocator (CUDA)
    first loss  of batch 0 from equal weights: all methods train the same function
"""

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from methods import ABLATIONS, METHODS, Spec

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"t5": ROOT / "configs" / "demo_t5.yaml", "gpt": ROOT / "configs" / "demo_gpt.yaml"}
START_S, BATCH_S = 240.0, 600.0
"""Deadlines: of a job's start, and of one batch."""
EVERY = METHODS | ABLATIONS
QUICK = ("planned", "planned_padded", "packed_rows", "token_based")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer methods and batches: five minutes on two cores")
    parser.add_argument("--data", type=Path, default=ROOT / ".demo" / "data", help="dataset folder")
    parser.add_argument("--model", choices=tuple(CONFIGS), help="default: both")
    parser.add_argument("--methods", help=f"of {','.join(EVERY)}")
    parser.add_argument("--ranks", type=int, default=2, help="pipeline stages")
    parser.add_argument("--batches", type=int, help="global batches (default 12; with --quick 5)")
    parser.add_argument("--rounds", type=int, default=2, help="times that every batch is trained by every method")
    parser.add_argument("--cost-model", type=Path, help="measured costs, of the one --model given")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: more flags of the runs")
    args = parser.parse_args()
    methods = args.methods.split(",") if args.methods else (QUICK if args.quick else tuple(METHODS))
    if unknown := set(methods) - set(EVERY):
        parser.error(f"expected --methods of {', '.join(EVERY)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    for model in [args.model] if args.model else list(CONFIGS):
        rows += compare(model, methods, args)
        print(table([row for row in rows if row["model"] == model]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"format": "dynapipe-throughput/1", "rows": rows}, indent=1) + "\n")


def compare(model: str, methods: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the same batches by every method; a row of figures for each."""
    batches = args.batches or (5 if args.quick else 12)
    with contextlib.ExitStack() as jobs, tempfile.TemporaryDirectory() as folder:
        costs = args.cost_model or profile(model, args, Path(folder))
        flags = ["--dynapipe-config", str(CONFIGS[model]), "--dynapipe-data", str(args.data)]
        flags += ["--dynapipe-cost-model", str(costs), *own_flags(args)]
        split: list[int] | None = None
        running: dict[str, Job] = {}
        for method in methods:
            if EVERY[method].plans_split and split is None:
                with started(model, method, flags, None, args.ranks) as chooser:
                    split = chooser.ask({"split": True})["layers_per_stage"]
            own = split if EVERY[method].plans_split else None
            running[method] = jobs.enter_context(started(model, method, flags, own, args.ranks))
        results: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for turn in range(args.rounds * batches + 1):
            order = [*methods[turn % len(methods) :], *methods[: turn % len(methods)]]
            for method in order:
                results[method].append(running[method].ask({"batch": 0 if turn == 0 else (turn - 1) % batches}))
            say(f"{model}: {turn} of {args.rounds * batches}")
    layout = f"1,1,{args.ranks}"
    planned = methods[0] if "planned" not in methods else "planned"
    return [
        figures(model, method, layout, split if EVERY[method].plans_split else None, results[method], results[planned])
        for method in methods
    ]


def figures(
    model: str,
    method: str,
    layout: str,
    split: list[int] | None,
    results: list[dict[str, Any]],
    planned: list[dict[str, Any]],
) -> dict[str, Any]:
    """One method's row; the first result is the warm-up, which gives the first loss."""
    timed, against = results[1:], planned[1:]
    tokens = sum(each["real_tokens"] for each in timed)
    pairs = [(other["ms"], mine["ms"]) for mine, other in zip(timed, against, strict=True)]
    return {
        "model": model,
        "method": method,
        "layout": layout,
        "layers_per_stage": split,
        "tokens_per_second": tokens / sum(each["ms"] for each in timed) * 1e3,
        "ratio_to_planned": interval(pairs),
        "padding_efficiency": min(tokens / sum(each["positions"] for each in timed), 1.0),
        "peak_memory_mb": max(each["peak_mb"] for each in timed),
        "idle": statistics.mean(share for each in timed for share in each["idle"]),
        "micro_batches": statistics.mean(each["micro_batches"] for each in timed),
        "prediction_error": statistics.median(abs(each["predicted_ms"] / each["ms"] - 1) for each in timed),
        "first_loss": results[0]["loss"],
    }


def interval(pairs: list[tuple[float, float]], draws: int = 2000) -> list[float]:
    """[low, value, high] of the ratio of sums of (planned ms, method's ms), resampled in pairs."""
    draw = random.Random(7)

    def ratio(some: list[tuple[float, float]]) -> float:
        return sum(one for one, _ in some) / sum(other for _, other in some)

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(draws))
    return [drawn[draws * 25 // 1000], ratio(pairs), drawn[draws * 975 // 1000 - 1]]


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| model | method | tokens/s | ratio to planned (95%) | padding efficiency | idle | memory MB | first loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, value, high = row["ratio_to_planned"]
        cells = (
            row["model"],
            row["method"],
            f"{row['tokens_per_second']:,.0f}",
            f"{value:.3f} ({low:.3f}–{high:.3f})",
            f"{row['padding_efficiency']:.1%}",
            f"{row['idle']:.0%}",
            f"{row['peak_memory_mb']:,.0f}",
            f"{row['first_loss']:.6f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Job:
    """The processes of one method, and the connection to their rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw")
        self.hello = self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Have one command run; its answer."""
        print(json.dumps(command), file=self._file, flush=True)
        return self._read()

    def close(self) -> None:
        """Let the processes end."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise SystemExit("a job ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def started(model: str, method: str, flags: list[str], split: list[int] | None, ranks: int) -> Iterator[Job]:
    """A method's processes, up and waiting for commands; ended with the block."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(START_S)
        spec = Spec(
            method=method,
            model=model,
            flags=flags,
            tensor_parallel=1,
            pipeline_parallel=ranks,
            layers_per_stage=split,
            port=server.getsockname()[1],
        )
        path = Path(folder) / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        say(f"{model}: starting {method}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__).parent / "worker.py"), str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            connection, _ = server.accept()
            connection.settimeout(BATCH_S)
            job = Job(connection)
            try:
                yield job
            finally:
                job.close()
                connection.close()
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def profile(model: str, args: argparse.Namespace, folder: Path) -> Path:
    """Measure the model's layers with as many processes as train."""
    path = folder / f"{model}.json"
    say(f"{model}: measuring costs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m"]
    command += ["megatron_dynapipe", "profile", "--model", model, "--output", str(path)]
    command += ["--budget-minutes", "0.7" if args.quick else "2", "--", "--dynapipe-config", str(CONFIGS[model])]
    command += ["--dynapipe-data", str(args.data), *own_flags(args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=1200)
    return path


def own_flags(args: argparse.Namespace) -> list[str]:
    """What follows the `--` of the command line."""
    return [flag for flag in args.flags if flag != "--"]


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
