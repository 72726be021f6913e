"""`patch`: apply, check or reverse the patches on a Megatron-LM checkout."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import PatchError

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.patching import Checkout


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("patch", help="apply, check or reverse the patches on a Megatron-LM checkout")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the folder that holds megatron/")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say what would be changed, and change nothing")
    action.add_argument("--reverse", action="store_true", help="restore the files as released")
    parser.add_argument("--json", action="store_true", help="print the result for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if `--check` finds a checkout that cannot be patched."""
    from megatron_dynapipe.patching import examine, load_all

    try:
        checkout = examine(args.checkout, load_all())
    except PatchError as error:
        if not args.check:
            raise
        print(_as_json(args.checkout, error) if args.json else f"{error}", file=sys.stdout if args.json else sys.stderr)
        return 1
    action = _act(checkout, check=args.check, reverse=args.reverse)
    print(_as_json(args.checkout, checkout, action) if args.json else _as_text(checkout, action))
    return 0


def _act(checkout: "Checkout", *, check: bool, reverse: bool) -> str:
    """Change what is to be changed; what was done."""
    from megatron_dynapipe.patching import State

    if check or checkout.state is (State.RELEASED if reverse else State.PATCHED):
        return "none"
    if reverse:
        checkout.reverse()
        return "reversed"
    checkout.apply()
    return "applied"


def _as_json(folder: Path, found: "Checkout | PatchError", action: str = "none") -> str:
    result: dict[str, object] = {"format": "dynapipe-patch/1", "checkout": str(folder), "action": action}
    if isinstance(found, PatchError):
        return json.dumps(result | {"error": found.message, "hint": found.hint}, indent=2)
    patches = [
        {"file": p.path.name, "subject": p.subject, "files": list(p.files), "added": p.added, "removed": p.removed}
        for p in found.series.patches
    ]
    details = {"version": found.series.version, "found": found.state, "tool": found.tool, "patches": patches}
    return json.dumps(result | details | {"error": None}, indent=2)


def _as_text(checkout: "Checkout", action: str) -> str:
    lines = [f"{checkout.folder}: {checkout.series.version}, {checkout.state}"]
    lines += [f"  {p.subject} ({', '.join(p.files)}: +{p.added} -{p.removed})" for p in checkout.series.patches]
    ends = {
        "applied": "applied; to go back: --reverse",
        "reversed": "reversed: the files are as released",
        "none": _nothing_done(checkout),
    }
    return "\n".join([*lines, ends[action]])


def _nothing_done(checkout: "Checkout") -> str:
    from megatron_dynapipe.patching import State

    return {
        State.RELEASED: "not patched; nothing was changed",
        State.PATCHED: "patched already",
        State.OUTDATED: "patched by an earlier release; run `megatron-dynapipe patch` on it to patch it anew",
    }[checkout.state]
