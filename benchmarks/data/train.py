"""Real multi-task text through the whole path: prepare, plan, train on two CPU ranks, evaluate by task.

    python benchmarks/data/train.py ROWS.jsonl[.gz] [--iterations 100] [--models t5,gpt] [--tokens 8192] [--json FILE]

ROWS has task, input and target. Prints, for each model, padding efficiency, tokens per second, waits for plans and the
share of an iteration that collation takes (on a thread of its own, measured apart, one core).
"""

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+) .*lm loss: (\S+) .*padding efficiency: ([\d.]+)"
    r" \| plan wait \(ms\): ([\d.]+)"
)
MOST_INPUT, MOST_TARGET = 1536, 256


def prepare(rows: Path, output: Path) -> float:
    """MB/s of the rows' bytes, unpacked, on all cores; the start of Python and training a tokenizer included."""
    size = len(gzip.decompress(rows.read_bytes())) if rows.suffix == ".gz" else rows.stat().st_size
    started = time.perf_counter()
    command = [sys.executable, "-m", "megatron_dynapipe", "data", "prepare", str(rows), "--output", str(output)]
    command += ["--vocabulary-size", "4096", "--skip-empty", "--long-samples", "truncate"]
    command += ["--max-input-length", str(MOST_INPUT - MOST_TARGET), "--max-target-length", str(MOST_TARGET)]
    subprocess.run(command, check=True)
    return size / 1e6 / (time.perf_counter() - started)


def train(model: str, data: Path, report: Path, args: argparse.Namespace) -> list[tuple[float, float, float, float]]:
    """(ms, loss, padding efficiency, wait in ms) of each iteration."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        str(ROOT / f"pretrain_{model}_multitask.py"),
        "--dynapipe-config",
        str(ROOT / f"configs/demo_{model}.yaml"),
    ]
    command += [
        "--dynapipe-data",
        str(data),
        "--dynapipe-report-dir",
        str(report),
        "--train-iters",
        str(args.iterations),
    ]
    command += ["--tokens-per-global-batch", str(args.tokens), "--dynapipe-long-samples", "truncate"]
    command += ["--eval-interval", str(args.iterations), "--eval-iters", "1"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := LINE.search(line):
                print(f"{model} {found[1]}: {found[2]} ms, loss {found[3]}", file=sys.stderr)
    if process.returncode:
        sys.exit("".join(lines[-40:]))
    found = [LINE.search(line) for line in lines]
    return [(float(each[2]), float(each[3]), float(each[4]), float(each[5])) for each in found if each]


def collate_ms(model: str, data: Path, tokens: int, batches: int = 20) -> tuple[float, float]:
    """(ms to collate everything of an iteration that one rank may need, tokens of an iteration), medians."""
    from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape
    from megatron_dynapipe.data.batches import dataset_sampler
    from megatron_dynapipe.data.collate import Collator, RequiredFields
    from megatron_dynapipe.data.meta import open_split, read_meta
    from megatron_dynapipe.planning.planner import Planner
    from megatron_dynapipe.planning.settings import PlannerSettings
    from megatron_dynapipe.units import BatchLayout, ModelFamily

    family = ModelFamily(model)
    shape = ModelShape(family=family, hidden=128, heads=4, kv_channels=32, ffn=512, vocabulary=4096)
    settings = PlannerSettings(
        family=family, encoder_layers=4, decoder_layers=4 * (family is ModelFamily.T5), hidden_size=128,
        pipeline_parallel=2, memory_limit_bytes=8 * 10**9, micro_batch_layouts=tuple(BatchLayout),
    )  # fmt: skip
    planner = Planner(settings, AnalyticCostModel(shape, CPU_RATES))
    needed = RequiredFields(tokens=True, decoder_tokens=family is ModelFamily.T5, labels=True)
    collator = Collator(required=needed, reader=open_split(data, "train"), special=read_meta(data))
    sampler = dataset_sampler(data, family, tokens_per_iteration=tokens)
    times, sizes = [], []
    for iteration in range(batches):
        batch = sampler.batch(iteration)
        plan = planner.plan(batch, iteration)
        started = time.perf_counter()
        for number, micro_batch in enumerate(plan.replicas[0].micro_batches):
            collator(number, micro_batch, family)
        times.append(1e3 * (time.perf_counter() - started))
        sizes.append(float(batch.input_lengths.sum() + batch.target_lengths.sum()))
    return statistics.median(times), statistics.median(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--models", default="t5,gpt")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        rate = prepare(args.rows, data)
        print(f"prepare {rate:.2f} MB/s, a tokenizer trained on the text included")
        for model in args.models.split(","):
            rows = train(model, data, Path(folder) / model, args)
            ms = statistics.median(row[0] for row in rows[2:])
            collate, tokens = collate_ms(model, data, args.tokens)
            results.append(
                {
                    "model": model,
                    "iterations": len(rows),
                    "first_loss": rows[0][1],
                    "last_loss": rows[-1][1],
                    "padding_efficiency": round(statistics.median(row[2] for row in rows), 4),
                    "tokens_per_second": round(tokens / ms * 1e3),
                    "plan_wait_share": round(sum(row[3] for row in rows[2:]) / sum(row[0] for row in rows[2:]), 5),
                    "collate_share": round(collate / ms, 5),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"prepare_mb_per_second": round(rate, 2), "runs": results}, indent=1))


if __name__ == "__main__":
    main()
