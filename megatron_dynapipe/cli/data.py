"""`data`: text tasks → a tokenised dataset folder, the demo mixture, length statistics."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.data.meta import DatasetMeta


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command and its actions."""
    parser = subparsers.add_parser("data", help="make a tokenised dataset, or describe one")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    demo = actions.add_parser("demo", help="the demo mixture: tasks from Python's own standard library")
    demo.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")

    prepare = actions.add_parser("prepare", help="text tasks → a tokenised dataset folder")
    prepare.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="JSON lines (also .gz) with task, input and target"
    )
    prepare.add_argument(
        "--huggingface", metavar="DATASET", help="a HuggingFace dataset (a folder, or a name) with these columns"
    )
    prepare.add_argument("--huggingface-split", default="train", metavar="NAME", help="its split (%(default)s)")
    prepare.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    prepare.add_argument("--tokenizer", type=Path, metavar="DIR", help="a HuggingFace tokenizer; else one is trained")
    prepare.add_argument(
        "--vocabulary-size", type=int, default=4096, metavar="N", help="of a trained tokenizer (%(default)s)"
    )
    prepare.add_argument("--valid-fraction", type=float, default=0.05, metavar="X", help="(%(default)s)")
    prepare.add_argument("--test-fraction", type=float, default=0.05, metavar="X", help="(%(default)s)")
    prepare.add_argument("--max-input-length", type=int, metavar="N", help="longest input, in tokens")
    prepare.add_argument("--max-target-length", type=int, metavar="N", help="longest target, in tokens")
    prepare.add_argument(
        "--long-samples", choices=("fail", "truncate", "skip"), default="fail", help="longer ones (%(default)s)"
    )
    prepare.add_argument("--skip-empty", action="store_true", help="leave out samples with an empty input or target")

    verify = actions.add_parser("verify", help="check every file and sample of a dataset folder")
    verify.add_argument("folder", type=Path, metavar="DIR", help="a dataset folder")

    stats = actions.add_parser("stats", help="lengths per task and in total")
    stats.add_argument("folder", type=Path, metavar="DIR", help="a dataset folder")
    stats.add_argument("--split", choices=("train", "valid", "test"), default="train", help="(%(default)s)")
    stats.add_argument("--json", action="store_true", help="print the statistics for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Do one of the actions; what was made, or found, goes to stdout. 1 if `verify` finds something wrong."""
    actions = {"demo": _demo, "prepare": _prepare, "stats": _stats, "verify": _verify}
    return actions[args.action](args) or 0


def _demo(args: argparse.Namespace) -> None:
    from megatron_dynapipe.data.demo import build_demo

    print("building the demo data from Python's standard library", file=sys.stderr)
    _print_made(build_demo(args.output), args.output)


def _prepare(args: argparse.Namespace) -> None:
    if bool(args.files) == bool(args.huggingface):
        raise ConfigError("expected either files or --huggingface, got " + ("both" if args.files else "neither"))
    from megatron_dynapipe.data.prepare import PrepareSettings, prepare_dataset
    from megatron_dynapipe.data.sources import read_huggingface, read_jsonl
    from megatron_dynapipe.sampling import LongSamples

    settings = PrepareSettings(
        source=args.huggingface or ", ".join(path.name for path in args.files),
        tokenizer=args.tokenizer,
        vocabulary_size=args.vocabulary_size,
        valid_fraction=args.valid_fraction,
        test_fraction=args.test_fraction,
        max_input_length=args.max_input_length,
        max_target_length=args.max_target_length,
        long_samples=LongSamples(args.long_samples),
        skip_empty=args.skip_empty,
    )
    if args.huggingface:
        samples = list(read_huggingface(args.huggingface, args.huggingface_split))
    else:
        samples = [sample for path in args.files for sample in read_jsonl(path)]
    print(f"tokenising {len(samples)} samples", file=sys.stderr)
    prepared = prepare_dataset(samples, args.output, settings)
    print(prepared.long_samples, file=sys.stderr)
    if prepared.empty_samples:
        print(f"{prepared.empty_samples} samples without input or target were left out", file=sys.stderr)
    if prepared.replaced is not None and prepared.replaced != prepared.meta:
        held = sum(prepared.replaced.samples.values())
        print(
            f"replaced another dataset in {args.output}: {held} samples of {prepared.replaced.source}", file=sys.stderr
        )
    _print_made(prepared.meta, args.output)


def _verify(args: argparse.Namespace) -> int:
    from megatron_dynapipe.data.check import problems
    from megatron_dynapipe.data.meta import read_meta

    found = 0
    for problem in problems(args.folder):
        found += 1
        print(problem, flush=True)
    meta = read_meta(args.folder)
    if not meta.files:
        print(f"{args.folder} was made without digests: only its form was checked", file=sys.stderr)
    if not found:
        print(f"{args.folder}: {sum(meta.samples.values())} samples are as they were written")
    return 1 if found else 0


def _stats(args: argparse.Namespace) -> None:
    import msgspec

    from megatron_dynapipe.data.stats import dataset_statistics, statistics_table

    statistics = dataset_statistics(args.folder, args.split)
    print(msgspec.json.encode(statistics).decode() if args.json else statistics_table(statistics))


def _print_made(meta: "DatasetMeta", folder: Path) -> None:
    counts = ", ".join(f"{count} {split}" for split, count in meta.samples.items())
    print(f"{folder}: {len(meta.tasks)} tasks, {counts}, vocabulary {meta.vocabulary_size}")
