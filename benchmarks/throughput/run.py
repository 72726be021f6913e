"""Real training of the same samples by each way to make micro-batches, taking turns.

    python benchmarks/throughput/run.py [--quick] [--data DATASET] [--model t5|gpt] [--methods a,b,…] [--ranks 2]
        [--cost-model FILE] [--json FILE] [--output FOLDER] [-- FLAGS of the runs, of Megatron or --dynapipe-…]

A job of processes per method stays up. For every global batch each job in turn trains it, in an order that rotates,
while the others wait without computing: whatever else the machine does slows all methods alike, and ratios are of one
batch at nearly one time. Methods that take many times as long as the planned runs train fewer of the batches. Baselines
take 1F1B, an equal layer split, one recompute mode, and of all sizes of micro-batches the one of least predicted time.
Costs are measured first (`profile`), unless a file is given.

    tokens/s    real tokens, without padding, of all batches over their time
    ratio       the method's tokens/s over those of the planned runs, or of --against, with a 95% interval (bootstrap
                over batches and rounds)
    idle        share of the time in which a stage computes nothing, mean of all stages
    memory      high-water mark of the largest process (CPU) or of the allocator (CUDA)
    first loss  of batch 0 from equal weights: all methods but `packing` and `stock` train the same function
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import ROOT, Job, environment, started
from methods import ABLATIONS, METHODS, STOCK
from report import Results, check_losses, figures, sentence, table, to_json, write

CONFIGS = {"t5": ROOT / "configs" / "demo_t5.yaml", "gpt": ROOT / "configs" / "demo_gpt.yaml"}
EVERY = METHODS | ABLATIONS
QUICK = ("planned", "planned_padded", "packed_rows", "token_based")
DEMO = ("planned", "packed_rows", "padding")
DEMO_SAMPLES, DEMO_BATCHES = 32, 2
SLOW, SELDOM = 4.0, 6
"""A method that takes so many times the planned runs' time in the warm-up trains every so many-th batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer methods and batches: five minutes on two cores")
    parser.add_argument("--data", type=Path, default=ROOT / ".demo" / "data", help="dataset folder")
    parser.add_argument("--model", choices=tuple(CONFIGS), help="default: both")
    parser.add_argument("--methods", help=f"of {','.join(EVERY)}")
    parser.add_argument("--against", metavar="METHOD", help="what ratios are to (planned, or else the first method)")
    parser.add_argument("--ranks", type=int, default=2, help="pipeline stages")
    parser.add_argument("--batches", type=int, help="global batches (default 12; with --quick 5)")
    parser.add_argument("--rounds", type=int, default=2, help="times that every batch is trained by every method")
    parser.add_argument("--cost-model", type=Path, help="measured costs, of the one --model given")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write them with a table and a chart")
    parser.add_argument("--demo", action="store_true", help="a minute's comparison, and what it says in a sentence")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: more flags of the runs")
    args = parser.parse_args()
    methods = chosen_methods(args)
    if args.against not in (None, *methods):
        parser.error(f"expected --against one of the methods {', '.join(methods)}, got {args.against}")
    if unknown := set(methods) - set(EVERY):
        parser.error(f"expected --methods of {', '.join(EVERY)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    for model in [args.model] if args.model else list(CONFIGS):
        rows += compare(model, [each for each in methods if each != STOCK or model == "gpt"], args)
        of_model = [row for row in rows if row["model"] == model]
        check_losses(of_model)
        print(sentence(of_model) if args.demo else table(of_model), flush=True)
    if args.json:
        args.json.write_text(to_json(rows))
    if args.output:
        write(rows, args.output)


def chosen_methods(args: argparse.Namespace) -> Sequence[str]:
    """Those that were named, else those of the kind of comparison."""
    if args.methods:
        named: list[str] = args.methods.split(",")
        return named
    return DEMO if args.demo else QUICK if args.quick else tuple(METHODS)


def compare(model: str, methods: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the same batches by every method; a row of figures for each."""
    batches = args.batches or (DEMO_BATCHES if args.demo else 5 if args.quick else 12)
    with contextlib.ExitStack() as jobs, tempfile.TemporaryDirectory() as folder:
        costs = args.cost_model or profile(model, args, Path(folder))
        flags = ["--dynapipe-config", str(CONFIGS[model]), "--dynapipe-data", str(args.data)]
        flags += ["--dynapipe-cost-model", str(costs), *own_flags(args)]
        split = chosen_split(model, methods, flags, args.ranks)
        splits = {method: split if EVERY[method].plans_split else None for method in methods}
        running: dict[str, Job] = {}
        for method in methods:
            say(f"{model}: starting {method}")
            running[method] = jobs.enter_context(started(model, method, flags, splits[method], args.ranks))
        results = take_turns(running, batches=batches, rounds=1 if args.demo else args.rounds)
    layout = f"1,1,{args.ranks}"
    base = args.against or ("planned" if "planned" in methods else methods[0])
    return [figures(model, method, layout, splits[method], results[method], results[base], base) for method in methods]


def chosen_split(model: str, methods: Sequence[str], flags: list[str], ranks: int) -> list[int] | None:
    """The planned layer split, where a method takes it."""
    method = next((each for each in methods if EVERY[each].plans_split), None)
    if method is None:
        return None
    say(f"{model}: choosing a layer split")
    with started(model, method, flags, None, ranks) as chooser:
        found: list[int] = chooser.ask({"split": True})["layers_per_stage"]
        return found


def take_turns(running: dict[str, Job], *, batches: int, rounds: int) -> dict[str, Results]:
    """Every method's answers by turn; turn 0 warms up with the first batch."""
    methods = list(running)
    results: dict[str, Results] = {method: {} for method in methods}
    for turn in range(rounds * batches + 1):
        for method in [*methods[turn % len(methods) :], *methods[: turn % len(methods)]]:
            if turn % SELDOM > 1 and is_slow(results, method):
                continue
            number = 0 if turn == 0 else (turn - 1) % batches
            results[method][turn] = running[method].ask({"batch": number})
        say(f"{turn} of {rounds * batches}")
    return results


def is_slow(results: dict[str, Results], method: str) -> bool:
    """Whether a method's warm-up took many times as long as that of the fastest."""
    return results[method][0]["ms"] > SLOW * min(each[0]["ms"] for each in results.values())


def profile(model: str, args: argparse.Namespace, folder: Path) -> Path:
    """Measure the model's layers with as many processes as train."""
    path = folder / f"{model}.json"
    say(f"{model}: measuring costs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m"]
    command += ["megatron_dynapipe", "profile", "--model", model, "--output", str(path)]
    command += ["--budget-minutes", "0.7" if args.quick else "2", "--", "--dynapipe-config", str(CONFIGS[model])]
    command += ["--dynapipe-data", str(args.data), *own_flags(args)]
    subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=1200)
    return path


def own_flags(args: argparse.Namespace) -> list[str]:
    """What follows the `--` of the command line, and what the kind of comparison asks for."""
    batch = ["--global-batch-size", str(DEMO_SAMPLES)] if args.demo else []
    return [*batch, *(flag for flag in args.flags if flag != "--")]


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
