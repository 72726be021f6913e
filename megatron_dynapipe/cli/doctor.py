"""`doctor`: what is installed, and whether it can train here."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dynapipe.cli.finding import Check
    from megatron_dynapipe.cli.main import SubParsers

MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("doctor", help="what is installed, and whether it can train here")
    parser.add_argument("--json", action="store_true", help="print the checks for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Run every check and print it; 1 if one of them stands in the way of training here."""
    from megatron_dynapipe.cli.checks import run_checks

    print("checking; importing torch takes a few seconds", file=sys.stderr)
    checks = run_checks()
    able = all(check.status != "fail" for check in checks)
    print(_as_json(checks, able) if args.json else _as_text(checks, able))
    return 0 if able else 1


def _as_json(checks: "list[Check]", able: bool) -> str:
    rows = [{"name": c.name, "status": c.status, "found": c.found, "hint": c.hint} for c in checks]
    return json.dumps({"format": "dynapipe-doctor/1", "can_train": able, "checks": rows}, indent=2)


def _as_text(checks: "list[Check]", able: bool) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}")
        if check.hint is not None:
            lines.append(f"{'':<{width + 6}}  hint: {check.hint}")
    lines.append("this machine can train" if able else "this machine cannot train: see FAIL above")
    return "\n".join(lines)
