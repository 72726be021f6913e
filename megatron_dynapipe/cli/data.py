"""`data`: text tasks → a tokenised dataset folder, the demo mixture, what a dataset holds."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily, amount
from megatron_dynapipe.data.meta import DatasetMeta, read_meta
from megatron_dynapipe.sampling import LongSamples, TruncationSide
from megatron_dynapipe.tools.inspect import SORTS, dataset_statistics, problems, statistics_table
from megatron_dynapipe.tools.mixture.spec import plain_mixture, read_mixture

_SHOWN = 10
"""Samples that `show` prints as text, unless others are asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    demo = actions.add_parser("demo", help="the demo mixture: tasks from Python's own standard library")
    demo.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")

    _add_prepare(actions)

    verify = actions.add_parser("verify", help="check every file and sample of a dataset folder")
    verify.add_argument("folder", type=Path, metavar="DIR", help="a dataset folder")

    _add_show(actions)

    stats = actions.add_parser("stats", help="lengths per task and in total")
    stats.add_argument("folder", type=Path, metavar="DIR", help="a dataset folder")
    stats.add_argument("--split", choices=("train", "valid", "test"), default="train", help="(%(default)s)")
    order = "order of the lines: by name, or the largest first (%(default)s)"
    stats.add_argument("--sort", choices=tuple(SORTS), default="task", help=order)
    longer = "count samples of more than N tokens, input and target together"
    stats.add_argument("--longer-than", type=int, metavar="N", help=longer)
    stats.add_argument("--json", action="store_true", help="print the statistics for a machine to read")


def _add_show(actions: Any) -> None:
    show = actions.add_parser(
        "show",
        help="samples as they are trained: what is given, and what is learned",
        description="What is learned is coloured; if the output is no terminal, it stands in ⟦ ⟧.",
    )
    show.add_argument("folder", type=Path, metavar="DIR", help="a dataset folder")
    show.add_argument("--split", choices=("train", "valid", "test"), default="train", help="(%(default)s)")
    show.add_argument("--task", metavar="NAME", help=f"samples of one task, {_SHOWN} of them")
    show.add_argument("--sample", type=int, metavar="N", help="one sample by its number, as errors name it")
    limit = "samples (default: one of each task, which take turns; with --json all, in order)"
    show.add_argument("--limit", type=int, metavar="N", help=limit)
    show.add_argument("--model", choices=tuple(ModelFamily), default="gpt", help="the kind of model (%(default)s)")
    show.add_argument("--json", action="store_true", help="a line of token ids for each sample")


def _add_prepare(actions: Any) -> None:
    prepare = actions.add_parser(
        "prepare",
        help="text tasks → a tokenised dataset folder",
        description="The same command does nothing if the dataset is complete. docs/data.md describes mixture files.",
    )
    add = prepare.add_argument
    files = "JSON lines with task, input and target (also .gz, .zst), Parquet, Arrow or CSV; a folder or a pattern"
    add("files", nargs="*", metavar="FILE", help=files)
    add("--mixture", type=Path, metavar="FILE.yaml", help="tasks, their sources and how they mix")
    add("--hub-root", type=Path, metavar="DIR", help="copies of hub datasets, by their names, to read instead")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    add("--tokenizer", type=Path, metavar="DIR", help="a HuggingFace tokenizer; else one is trained")
    add("--pad-token", metavar="TOKEN", help="of the given tokenizer, to pad with in place of its own")
    add("--vocabulary-size", type=int, default=4096, metavar="N", help="of a trained tokenizer (%(default)s)")
    add("--valid-fraction", type=float, default=0.05, metavar="X", help="of each entry's samples (%(default)s)")
    add("--test-fraction", type=float, default=0.05, metavar="X", help="of each entry's samples (%(default)s)")
    add("--max-input-length", type=int, metavar="N", help="longest input, in tokens")
    add("--max-target-length", type=int, metavar="N", help="longest target, in tokens")
    add("--long-samples", choices=("fail", "truncate", "skip"), default="fail", help="longer ones (%(default)s)")
    where = "where truncated samples lose tokens (%(default)s)"
    add("--truncate", choices=("right", "left", "middle"), default="right", help=where)
    bad = "rows that cannot be used: the first one ends the preparation, or they are left out and counted (%(default)s)"
    add("--bad-rows", choices=("fail", "skip"), default="fail", help=bad)
    empty = "leave out samples with an empty input or target, and conversations without a turn of the assistant"
    add("--skip-empty", action="store_true", help=empty)
    add("--workers", type=int, metavar="N", help="processes that tokenise (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Do one of the actions; what was made, or found, goes to stdout. 1 if `verify` finds something wrong."""
    actions = {"demo": _demo, "prepare": _prepare, "show": _show, "stats": _stats, "verify": _verify}
    return actions[args.action](args) or 0


def _demo(args: argparse.Namespace) -> None:
    from megatron_dynapipe.tools.demo_data import build_demo

    print("building the demo data from Python's standard library", file=sys.stderr)
    _print_made(build_demo(args.output), args.output)


def _prepare(args: argparse.Namespace) -> None:
    if bool(args.files) == (args.mixture is not None):
        raise ConfigError(f"expected either files or --mixture, got {'both' if args.files else 'neither'}")
    from megatron_dynapipe.tools.mixture.sources import open_sources
    from megatron_dynapipe.tools.prepare import BadRows, PrepareSettings, prepare_mixture

    root = Path()
    if args.mixture:
        mixture = read_mixture(args.mixture)
        root = args.mixture.parent
        source = args.mixture.name
    else:
        mixture = plain_mixture(tuple(args.files))
        source = ", ".join(Path(path).name for path in args.files)
    flags = {name: getattr(args, name) for name in PrepareSettings.__dataclass_fields__ if name in args}
    choices: dict[str, object] = {
        "bad_rows": BadRows(args.bad_rows),
        "long_samples": LongSamples(args.long_samples),
        "truncate": TruncationSide(args.truncate),
    }
    settings = PrepareSettings(source=source, **flags | choices)
    sources = open_sources(mixture, root, hub_root=args.hub_root)
    meta, notes = prepare_mixture(mixture, sources, args.output, settings, show_progress=True)
    for line in notes:
        print(line, file=sys.stderr)
    _print_made(meta, args.output)


def _verify(args: argparse.Namespace) -> int:
    count = 0
    for problem in problems(args.folder):
        count += 1
        print(problem, flush=True)
    meta = read_meta(args.folder)
    if not meta.files:
        print(f"{args.folder} was made without digests: only its form was checked", file=sys.stderr)
    if not count:
        print(f"{args.folder}: {sum(meta.split_samples.values())} samples are as they were written")
    return 1 if count else 0


def _show(args: argparse.Namespace) -> None:
    from megatron_dynapipe.tools.taught import sample_printer, taught_samples

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"expected --limit of at least 1, got {args.limit}")
    samples = taught_samples(args.folder, args.split, ModelFamily(args.model), _numbers(args))
    if args.json:
        for sample in samples:
            print(json.dumps(sample.row(), ensure_ascii=False))
        return
    printed = sample_printer(args.folder, coloured=sys.stdout.isatty())
    for sample in samples:
        print(printed(sample))


def _numbers(args: argparse.Namespace) -> list[int]:
    """Numbers of the samples that `show` prints; raises ConfigError."""
    from megatron_dynapipe.tools.taught import chosen_samples

    meta = read_meta(args.folder)
    count = meta.split_samples[args.split]
    if args.sample is not None:
        if args.task is not None or not 0 <= args.sample < count:
            places = f"from 0 to {count - 1} of {args.split}"
            raise ConfigError(f"expected --sample {places}, without --task, got {args.sample}")
        return [args.sample]
    if args.json and args.task is None:
        return [*range(count)][: args.limit]
    chosen = chosen_samples(args.folder, args.split, args.task)
    if args.limit is None and not args.json:
        return chosen[: len(meta.samples[args.split]) if args.task is None else _SHOWN]
    return chosen[: args.limit]


def _stats(args: argparse.Namespace) -> None:
    statistics = dataset_statistics(args.folder, args.split, longer_than=args.longer_than)
    print_json(statistics) if args.json else print(statistics_table(statistics, sort=args.sort))


def _print_made(meta: DatasetMeta, folder: Path) -> None:
    counts = ", ".join(f"{count} {split}" for split, count in meta.split_samples.items())
    print(f"{folder}: {amount(len(meta.tasks), 'task')}, {counts}, vocabulary {meta.vocabulary_size}")
