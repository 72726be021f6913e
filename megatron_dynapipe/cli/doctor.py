"""`doctor`: what is installed, and whether it can train here."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dynapipe.cli.checks import Check
    from megatron_dynapipe.cli.main import SubParsers

MARKS = {"ok": "ok  ", "note": "note", "absent": "–   ", "fail": "FAIL"}


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("doctor", help="what is installed, and whether it can train here")
    parser.add_argument("--json", action="store_true", help="print the checks for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Run every check and print it; 1 if something that is installed cannot work."""
    from megatron_dynapipe.cli.checks import NEEDED_TO_PLAN, TO_TRAIN, run_checks

    print("checking; importing torch takes a few seconds", file=sys.stderr)
    checks = run_checks()
    failed = {check.name for check in checks if check.status == "fail"}
    absent = {check.name for check in checks if check.status == "absent"}
    can_train, can_plan = not failed | absent, not failed & NEEDED_TO_PLAN
    if args.json:
        print(_as_json(checks, can_train=can_train, can_plan=can_plan))
    else:
        able = "train" if can_train else "plan, not train: see FAIL above" if failed else f"plan; to train: {TO_TRAIN}"
        print(_as_text(checks))
        print(f"this machine can {able}" if can_plan else "this machine cannot train: see FAIL above")
    return 1 if failed else 0


def _as_json(checks: "list[Check]", *, can_train: bool, can_plan: bool) -> str:
    rows = [{"name": c.name, "status": c.status, "found": c.found, "hint": c.hint} for c in checks]
    report = {"format": "dynapipe-doctor/1", "can_train": can_train, "can_plan": can_plan, "checks": rows}
    return json.dumps(report, indent=2)


def _as_text(checks: "list[Check]") -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}")
        if check.hint is not None:
            lines.append(f"{'':<{width + 6}}  hint: {check.hint}")
    return "\n".join(lines)
