"""`doctor`: what is installed, and whether it can train here."""

import argparse
import sys
from pathlib import Path

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.store.address import FORM
from megatron_dynapipe.tools.doctor import NEEDED_TO_PLAN, TO_TRAIN, run_checks

MARKS = {"ok": "ok  ", "note": "note", "absent": "–   ", "fail": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the checks for a machine to read")
    parser.add_argument(
        "--store-url-file",
        type=Path,
        metavar="FILE",
        help=f"file that holds the URL of a plan store to reach, {FORM} (default: DYNAPIPE_STORE_URL, else start one)",
    )


def run(args: argparse.Namespace) -> int:
    """Run every check and print it; 1 if something that is installed cannot work."""
    print("checking; importing PyTorch and Megatron takes some ten seconds", file=sys.stderr)
    checks = run_checks(args.store_url_file)
    failed = {name for name, check in checks.items() if check.status == "fail"}
    absent = {name for name, check in checks.items() if check.status == "absent"}
    can_train = not failed | absent
    can_plan = not failed & NEEDED_TO_PLAN
    if args.json:
        rows = [{"name": name, **check._asdict()} for name, check in checks.items()]
        print_json({"format": "dynapipe-doctor/1", "can_train": can_train, "can_plan": can_plan, "checks": rows})
        return 1 if failed else 0
    width = max(map(len, checks))
    for name, (status, text, hint) in checks.items():
        print(f"{MARKS[status]}  {name:<{width}}  {text}")
        if hint is not None:
            print(f"{'':<{width + 6}}  hint: {hint}")
    able = "train" if can_train else "plan, not train: see FAIL above" if failed else f"plan; to train: {TO_TRAIN}"
    print(f"this machine can {able}" if can_plan else "this machine cannot train: see FAIL above")
    return 1 if failed else 0
