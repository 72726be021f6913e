"""`cost-model`: show, compare and check cost model files."""

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.costing.check import tables_of
from megatron_dynapipe.costing.file import TableCostModel
from megatron_dynapipe.costing.format import CostFile
from megatron_dynapipe.megatron.flags.planning_flags import number
from megatron_dynapipe.tools.cost_files import differences, held_out_errors

_QUANTITIES = {"time_ms": "time", "stored_activation_mb": "stored memory", "peak_activation_mb": "peak memory"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what a file holds")
    show.add_argument("file", type=Path, metavar="FILE")
    diff = actions.add_parser("diff", help="how the measurements of two files differ")
    diff.add_argument("first", type=Path, metavar="FIRST")
    diff.add_argument("second", type=Path, metavar="SECOND")
    check = actions.add_parser("check", help="fit on a random share of a file's points, predict the others")
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--keep", type=float, default=0.25, metavar="SHARE", help="of the points (default 0.25)")
    check.add_argument(
        "--seed", type=number(int, 0, 2**64 - 1), default=0, metavar="N", help="of the choice (default 0)"
    )
    for action in (show, diff, check):
        action.add_argument("--json", action="store_true", help="for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Do what is asked; 0."""
    if args.action == "show":
        contents = _contents(TableCostModel.load(args.file).file)
        print_json(contents) if args.json else _print_contents(contents)
    elif args.action == "diff":
        first, second = (TableCostModel.load(path).file for path in (args.first, args.second))
        rows = differences(first, second)
        print_json(rows) if args.json else _print_differences(rows)
    else:
        held_out = held_out_errors(TableCostModel.load(args.file).file, keep=args.keep, seed=args.seed)
        if args.json:
            print_json(held_out)
        for quantity, error in held_out.items() if not args.json else ():
            print(f"{_QUANTITIES[quantity]}: median error {error.median:.1%}, ninth decile {error.p90:.1%}")
    return 0


def _contents(file: CostFile) -> dict[str, Any]:
    """The text of `show`: where the file is from, and the range of each key."""
    measured = tables_of(file)
    keys = {}
    for key, entry in file.keys.items():
        times = [points for (k, quantity, _), points in measured.items() if k == key and quantity == "time_ms"]
        shapes = [shape for points in times for shape in points]
        keys[key] = {
            "measured_points": sum(map(len, times)),
            "largest_size": max(shape[0] for shape in shapes),
            "longest": max(max(shape[1:]) for shape in shapes),
            "model_state_mb": entry.model_state_mb,
        }
    names = ("name", "family", "device", "source", "model", "provenance", "links")
    contents = {name: getattr(file, name) for name in names} | {"keys": keys}
    return msgspec.json.decode(msgspec.json.encode(contents), type=dict[str, Any])  # numbers for the model's raw JSON


def _print_contents(contents: dict[str, Any]) -> None:
    for name in ("name", "family", "device", "source"):
        print(f"{name}: {contents[name]}")
    for name in ("model", "provenance", "links"):
        print(*(f"{name} {key}: {value}" for key, value in contents[name].items()), sep="\n", end="")
        print("\n" * bool(contents[name]), end="")
    for key, entry in contents["keys"].items():
        state = ", ".join(f"{kind} {mb:.1f} MB" for kind, mb in entry["model_state_mb"].items())
        print(
            f"{key}: {entry['measured_points']} times measured, up to {entry['largest_size']} samples"
            f" and {entry['longest']} positions; parameters: {state}"
        )


def _print_differences(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        where = f"{row['key']} {row['quantity']} {row['part']}"
        only = (
            f"{row['shared']} shared points, {row['only_first']} only in the first, {row['only_second']} in the second"
        )
        if math.isnan(row["median"]):
            print(f"{where}: {only}")
        else:
            print(f"{where}: differs by {row['median']:.1%} (median), {row['largest']:.1%} (most); {only}")
