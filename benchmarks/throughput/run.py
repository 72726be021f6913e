"""Real training of the same samples by each way to make micro-batches, taking turns.

    python benchmarks/throughput/run.py [--quick] [--data DATASET] [--model t5|gpt] [--methods a,b,…]
        [--ranks 2 | --layouts 1,1,2;2,1,1;1,2,1] [--max-lengths 512,1536] [--device auto|cpu|cuda]
        [--cost-model FILE] [--against a[,b]] [--json FILE] [--output FOLDER] [-- FLAGS of the runs, of Megatron or
        --dynapipe-…]
    python benchmarks/throughput/run.py --draw FILE … --output FOLDER

One command compares all methods on every model × layout × maximum length. Layouts are data, tensor and pipeline
parallel ranks, by default RANKS pipeline stages; longer samples than a maximum length are truncated. A job of processes
per method stays up. Each job in turn, in an order that rotates, trains a global batch twice, while the others wait
without computing; the second time counts, since the first begins with cold caches. Whatever else the machine does
slows all methods alike, and ratios are of one batch at nearly one time. Methods that take many times as long as the
planned runs train fewer batches. Baselines take 1F1B, an equal layer split, one recompute mode, and of all sizes of
micro-batches that of least predicted time; planned methods take the best layer split of each layout. Costs are measured
first (`profile`), unless a file is given.

    tokens/s    real tokens, without padding, of all replicas and batches over their time
    ratio       the method's tokens/s over those of the planned runs, or of --against (of several the fastest, which
                the column names), with a 95% interval (bootstrap over batches and rounds)
    idle        share of the time in which a stage computes nothing, mean of all ranks
    planning    time on one core to plan an iteration, and as a share of the iteration. It is not part of the iteration:
                in training another process plans ahead, so that ranks wait only where this share comes near 1 for each
                planner process
    memory      high-water mark of the largest process (CPU) or of the allocator (CUDA)
    first loss  of batch 0 from equal weights: all methods but `packing` and `stock` train the same function

Where PyTorch finds GPUs, models are of their size (`gpu_t5.yaml`, `gpu_gpt.yaml`: bf16), one rank to a GPU, on a
synthetic mixture of lengths with long tails (`synthetic.py`). More ranks than GPUs share them, and talk through the
host. `--size gpu --device cpu` does the same without a GPU, with flags after -- that make it small.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

from benchmarks.common import DEMO_DATA
from benchmarks.throughput import synthetic
from benchmarks.throughput.comparison import Case, Layout, layouts_of, lengths_of, product
from benchmarks.throughput.devices import CONFIGS, DEVICES, SIZES, SYNTHETIC_DATA, machine_of, size_of
from benchmarks.throughput.methods import MEGATRON, METHODS
from benchmarks.throughput.report import SAME_LOSS, SAME_LOSS_BF16, check_losses, sentence, table, to_json, write
from benchmarks.throughput.training import EVERY, Setting, compare
from megatron_dynapipe import config

QUICK = ("planned", "planned_padded", "packed_rows", "token_based")
DEMO = ("planned", "packed_rows", "padding")


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    check(parser, args)
    if args.draw:
        write([row for path in args.draw for row in json.loads(path.read_text())["rows"]], args.output)
        return
    given = ["--dynapipe-device", args.device, *config.expand(args.flags)]
    machine = machine_of(config.early_flags(given).dynapipe_device)
    size = size_of(args.size, machine, demo=args.demo)
    data = args.data or (DEMO_DATA if size == "demo" else synthetic.make(SYNTHETIC_DATA))
    models = [args.model] if args.model else list(CONFIGS[size])
    default = Layout(data=1, tensor=1, pipeline=args.ranks or machine.gpus or 2)
    cases = list(product(models, args.layouts or [default], args.max_lengths))
    for case in cases:
        if machine.gpus and case.layout.tensor > machine.gpus:
            parser.error(f"expected at most {machine.gpus} tensor-parallel ranks on {machine.gpus} GPUs, got {case}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(args=args, machine=machine, size=size, data=data, folder=Path(folder))
        for case in cases:
            methods = [method for method in chosen_methods(args) if runs(method, case)]
            earlier = list(rows)
            of_case = compare(case, methods, setting, lambda so_far, earlier=earlier: keep(args.json, earlier + so_far))
            in_bf16 = size == "gpu" or "--bf16" in args.flags
            check_losses(of_case, SAME_LOSS_BF16 if in_bf16 else SAME_LOSS)
            print(_in_a_demo(of_case) if args.demo else table(of_case), flush=True)
            rows += of_case
    keep(args.json, rows)
    if args.output:
        write(rows, args.output)


def _in_a_demo(rows: list[dict[str, Any]]) -> str:
    return sentence(rows, load=os.getloadavg()[0], cores=len(os.sched_getaffinity(0)))


def keep(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows that there are so far, in place of earlier ones, where they are asked for."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(to_json(rows))
        part.replace(path)


def runs(method: str, case: Case) -> bool:
    """Whether a method has anything to train in a case: Megatron alone a GPT, virtual stages a pipeline."""
    return (method not in MEGATRON or case.model == "gpt") and (EVERY[method].chunks == 1 or case.layout.pipeline > 1)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer methods and batches: five minutes on two cores")
    add("--data", type=Path, help="dataset folder (default: the demo's; on GPUs a synthetic one, which is made)")
    add("--model", choices=tuple(CONFIGS["demo"]), help="default: both")
    add("--methods", help=f"of {','.join(EVERY)}")
    add(
        "--against", metavar="METHOD[,…]", help="what ratios are to, the fastest of them (planned, or the first method)"
    )
    add("--ranks", type=int, help="pipeline stages (default: one on each GPU, without GPUs 2)")
    add(
        "--layouts",
        type=layouts_of,
        metavar="D,T,P[;…]",
        help="data, tensor, pipeline parallel ranks, instead of --ranks",
    )
    add(
        "--max-lengths",
        type=lengths_of,
        default=[],
        metavar="N[,…]",
        help="longest samples, tokens (default: the model's)",
    )
    add("--device", choices=DEVICES, default="auto", help="of the ranks (%(default)s: CUDA where there is any)")
    add("--size", choices=SIZES, default="auto", help="of models and data (%(default)s: the device's)")
    add(
        "--together",
        type=int,
        metavar="N",
        help="methods whose jobs are up at a time (default: all; on GPUs 2); 1: one after another, not in turns",
    )
    add("--batches", type=int, help="global batches (default 12; with --quick 5)")
    add("--rounds", type=int, default=2, help="times that every batch is trained by every method")
    add("--cost-model", type=Path, help="measured costs, of the one --model given")
    add("--profile-minutes", type=float, help="to measure costs (default 2; with --quick 0.7); 0: costs are computed")
    add("--json", type=Path, help="where to write the figures")
    add("--output", type=Path, metavar="FOLDER", help="where to write them with a table and a chart")
    add("--draw", type=Path, nargs="+", metavar="FILE", help="write --output of these JSON files, without training")
    add("--demo", action="store_true", help="a minute's comparison, and what it says in a sentence")
    add("flags", nargs=argparse.REMAINDER, help="after --: more flags of the runs")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message where arguments do not go together."""
    methods = chosen_methods(args)
    if args.draw and not args.output:
        parser.error("expected the --output folder that --draw writes, got none")
    against = args.against.split(",") if args.against else []
    if unknown := set(against) - set(methods):
        parser.error(f"expected --against of the methods {', '.join(methods)}, got {', '.join(sorted(unknown))}")
    if len(against) > 1 and args.together:
        parser.error(f"expected one method --against with --together, whose jobs are never all up, got {args.against}")
    if unknown := set(methods) - set(EVERY):
        parser.error(f"expected --methods of {', '.join(EVERY)}, got {', '.join(sorted(unknown))}")
    if args.ranks and args.layouts:
        parser.error("expected --ranks or --layouts, got both; a layout says how many ranks it has")
    if args.cost_model and not args.model:
        parser.error("expected the --model that --cost-model is of, got none")
    if args.together is not None and args.together < 1:
        parser.error(f"expected --together of 1 or more jobs, got {args.together}")


def chosen_methods(args: argparse.Namespace) -> Sequence[str]:
    """Those that were named, else those of the kind of comparison."""
    if args.methods:
        return args.methods.split(",")
    return DEMO if args.demo else QUICK if args.quick else tuple(METHODS)


if __name__ == "__main__":
    main()
