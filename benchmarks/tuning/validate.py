"""The choice of `tune` against measured training of every layout, on the ranks at hand.

    python -m benchmarks.tuning.validate --model gpt|t5 [--iterations 6] [--rounds 1] [--cases N] [--json FILE]

The demo's model is profiled on two ranks, for tensor parallelism of 1 and of 2. Every case (layout × split × recompute
× padded or packed micro-batches) is predicted by `megatron-dynapipe tune` on these costs and trained by the entry
script, all on the same samples. The tuned choice is the case of least predicted time.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.common import DEMO_DATA, ROOT, environment, run_quietly, say, torchrun
from megatron_dynapipe.cost import CPU_RATES
from megatron_dynapipe.tuning import Measured, measure, run_file, training_command

RANKS = 2
MEMORY_MB = 3000
"""Of a rank: more than any case needs."""
WITHIN, CORRELATION = 0.05, 0.8
"""What is aimed at: the choice's distance from the best, and the rank correlation."""
_FEWEST = 3
"""Cases with a rank correlation."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train, with its predicted time."""

    tensor_parallel: int
    pipeline_parallel: int
    layers_per_stage: tuple[int, ...]
    layout: str
    recompute: str
    predicted_ms: float

    @property
    def name(self) -> str:
        """Data · tensor · pipeline, layers, layout and recompute."""
        data = RANKS // self.tensor_parallel // self.pipeline_parallel
        layers = f" {','.join(map(str, self.layers_per_stage))}" if self.pipeline_parallel > 1 else ""
        return f"{data}·{self.tensor_parallel}·{self.pipeline_parallel}{layers} {self.layout} {self.recompute}"


def main() -> int:
    """Print the table and what it comes to; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "t5"), required=True)
    parser.add_argument("--data", type=Path, default=DEMO_DATA)
    parser.add_argument("--samples", type=int, default=32, help="of a global batch (%(default)s)")
    parser.add_argument("--iterations", type=int, default=6, help="the first does not count (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="times that each is trained (%(default)s)")
    parser.add_argument("--cases", type=int, help="fewer cases, for a trial")
    parser.add_argument("--profile-minutes", type=float, default=1.0, help="of each of two profiles (%(default)s)")
    parser.add_argument("--costs", type=Path, help="folder of profiles, kept and used again")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one run (%(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.costs or Path(scratch)
        costs = {tensor: profile(args, folder / f"{args.model}-{tensor}.json", tensor) for tensor in (1, 2)}
        cases = predicted(args, costs)[: args.cases]
        commands = [command(args, case, costs[case.tensor_parallel], Path(scratch)) for case in cases]
        found = measure(commands, iterations=args.iterations, deadline_s=args.deadline_s, rounds=args.rounds, said=say)
    return report(args, cases, found)


def config(args: argparse.Namespace) -> Path:
    """The demo's run file."""
    return ROOT / "configs" / f"demo_{args.model}.yaml"


def profile(args: argparse.Namespace, path: Path, tensor: int) -> Path:
    """Measure the model's layers on both ranks, which is also how busy the machine is in training."""
    if path.exists():
        return path
    say(f"profiling {args.model}, tensor parallelism {tensor}")
    command = [*torchrun(RANKS), "-m", "megatron_dynapipe", "profile", "--model", args.model, "--output", path]
    command += ["--tensor-parallel", tensor, "--budget-minutes", args.profile_minutes, "--"]
    command += ["--dynapipe-config", config(args), "--dynapipe-data", args.data]
    run_quietly(command, timeout_s=1200)
    return path


def predicted(args: argparse.Namespace, costs: dict[int, Path]) -> list[Case]:
    """Every case that can be planned, with its predicted time."""
    say("predicting")
    cases = []
    for tensor, layout, recompute in itertools.product(costs, ("padded", "packed"), ("none", "full")):
        words = [sys.executable, "-m", "megatron_dynapipe", "tune", "--json", "--workers", "1"]
        words += ["--data", str(args.data), "--global-batch-size", str(args.samples)]
        words += ["--limit", str(args.iterations), "--model-config", str(config(args))]
        words += ["--cost-model", str(costs[tensor]), "--device-memory-mb", str(MEMORY_MB)]
        words += ["--devices", str(RANKS), "--layout", layout, "--recompute", recompute]
        words += ["--distributed-optimizer", "off", "--layer-splits", "equal,even", "--top", "100"]
        words += ["--memory-gb-per-s", str(CPU_RATES.bytes_per_second / 1e9)]
        done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, check=False, timeout=600)
        if done.returncode not in (0, 1):  # 1: no layout of these can be planned
            raise SystemExit(f"tune ended with status {done.returncode}; its error is above")
        for each in json.loads(done.stdout)["layouts"]:
            if each["predicted_ms"] is not None and each["tensor_parallel"] == tensor:
                known = {name: each[name] for name in ("tensor_parallel", "pipeline_parallel", "predicted_ms")}
                split = tuple(each["layers_per_stage"])
                cases.append(Case(**known, layers_per_stage=split, layout=layout, recompute=recompute))
    return cases


def command(args: argparse.Namespace, case: Case, costs: Path, folder: Path) -> list[str]:
    """The training run of a case."""
    flags: dict[str, str | int | bool] = {
        "tensor-model-parallel-size": case.tensor_parallel,
        "pipeline-model-parallel-size": case.pipeline_parallel,
        "dynapipe-layout": case.layout,
        "dynapipe-limit-rc-type": case.recompute,
        "dynapipe-cost-model": str(costs),
        "dynapipe-recalibrate": False,
        "dynapipe-device-memory-limit": MEMORY_MB,
        "dynapipe-data": str(args.data),
        "global-batch-size": args.samples,
    }
    if case.pipeline_parallel > 1:
        flags["dynapipe-layers-per-stage"] = ",".join(map(str, case.layers_per_stage))
    path = folder / f"{case.name.replace(' ', '_')}.yaml"
    path.write_text(run_file(flags, case.name))
    script = str(ROOT / f"pretrain_{args.model}_multitask.py")
    words = ["--dynapipe-config", str(config(args)), "--dynapipe-config", str(path)]
    words += ["--dynapipe-report-dir", str(folder / "report")]
    return training_command(script, words, devices=RANKS, iterations=args.iterations)


def report(args: argparse.Namespace, cases: Sequence[Case], found: Sequence[Measured]) -> int:
    """The table, the choice, and the correlation."""
    rows: list[dict[str, Any]] = [
        {"case": case.name, "predicted_ms": case.predicted_ms, "measured_ms": one.mean_ms, "error": one.error}
        for case, one in zip(cases, found, strict=True)
    ]
    print("| case (data · tensor · pipeline) | predicted ms | measured ms |")
    print("|---|---|---|")
    for row in sorted(rows, key=lambda row: row["measured_ms"] or float("inf")):
        measured = "failed" if row["measured_ms"] is None else f"{row['measured_ms']:.0f}"
        print(f"| {row['case']} | {row['predicted_ms']:.0f} | {measured} |")
    for row in rows:
        if row["error"] is not None:
            print(f"{row['case']}: {row['error']}", file=sys.stderr)
    trained = [row for row in rows if row["measured_ms"] is not None]
    if len(trained) < _FEWEST:
        print(f"{args.model}: {len(trained)} of {len(rows)} cases trained, too few to rank")
        return 1
    times = np.array([[row["predicted_ms"], row["measured_ms"]] for row in trained])
    behind = float(times[times[:, 0].argmin(), 1] / times[:, 1].min() - 1)
    correlation = rank_correlation(times[:, 0], times[:, 1])
    chosen = trained[int(times[:, 0].argmin())]["case"]
    print(f"{args.model}: {len(trained)} of {len(rows)} cases trained; tuned choice: {chosen}")
    print(f"behind the best: {behind:.1%} (aim {WITHIN:.0%}); rank correlation {correlation:.2f} (aim {CORRELATION})")
    if args.json is not None:
        figures = {"model": args.model, "behind": behind, "rank_correlation": correlation, "cases": rows}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if behind <= WITHIN and correlation >= CORRELATION and len(trained) == len(rows) else 1


def rank_correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's."""
    ranks = [values.argsort().argsort() for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    os.environ.update(environment())
    sys.exit(main())
