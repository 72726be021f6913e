"""`patch`: apply, check, merge or reverse the patches on a Megatron-LM checkout."""

import argparse
import sys
from pathlib import Path

from megatron_dynapipe.checkout.survey import UNKNOWN, State, Survey, survey
from megatron_dynapipe.cli import print_json
from megatron_dynapipe.core.errors import PatchError
from megatron_dynapipe.tools.patch import change, refusal

FORMAT = "dynapipe-patch/2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the folder that holds megatron/")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say what each file is, and change nothing")
    action.add_argument("--reverse", action="store_true", help="take the patches out; your own changes stay")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge with your changes: three-way in a git checkout, elsewhere if a patch's context is found",
    )
    parser.add_argument("--json", action="store_true", help="print the result for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if `--check` finds a checkout that cannot be patched."""
    if args.check:
        return _check(args.checkout, as_json=args.json)
    was = survey(args.checkout)[0]
    changed = change(args.checkout, reverse=args.reverse, merge=args.merge)
    is_merged = State.MODIFIED in {state for state, _ in was.files.values()}
    action = "none" if not changed else "reversed" if args.reverse else "merged" if is_merged else "applied"
    now = survey(args.checkout)[0]
    print_json(_result(now, action, was=was.state)) if args.json else print(_as_text(now, action))
    return 0


def _check(folder: Path, *, as_json: bool) -> int:
    """Print what a checkout is; 1 if it cannot be patched."""
    checkout = None
    error = None
    try:
        checkout = survey(folder)[0]
        error = refusal(checkout) if checkout.named(*UNKNOWN) else None
    except PatchError as raised:
        error = raised
    if as_json:
        known: dict[str, object] = {"format": FORMAT, "checkout": str(folder)}
        known = _result(checkout, "none", was=checkout.state) if checkout else known
        print_json(known | ({"error": error.message, "hint": error.hint} if error else {}))
        return int(error is not None)
    if checkout:
        print(_as_text(checkout, "none"))
    if error:
        print(error, file=sys.stderr)
    return int(error is not None)


def _result(now: Survey, action: str, *, was: str) -> dict[str, object]:
    """What `--json` prints: `found` is the checkout's state before, `files` are as they are now."""
    patches = [
        {"file": path.name, "subject": subject, "files": [changed], "added": len(added), "removed": 0}
        for path, subject, changed, added in now.series.patches
    ]
    files = [
        {"name": name, "state": state, "releases": list(releases)} for name, (state, releases) in now.files.items()
    ]
    result = {"format": FORMAT, "checkout": str(now.folder), "action": action, "says": now.says}
    details = {"version": now.series.version, "found": was, "files": files, "patches": patches}
    return result | details | {"error": None, "hint": None}


def _as_text(checkout: Survey, action: str) -> str:
    lines = [f"{checkout.folder}: Megatron {checkout.says}, patches of {checkout.series.version}"]
    lines += [
        f"  {name}: {state}{f' ({", ".join(releases)})' if releases else ''}"
        for name, (state, releases) in checkout.files.items()
    ]
    lines += [f"  patch: {subject} ({file}: +{len(added)})" for _, subject, file, added in checkout.series.patches]
    return "\n".join([*lines, _summary(checkout, action)])


def _summary(checkout: Survey, action: str) -> str:
    if action == "reversed":
        return "reversed: the patches are out" + ("" if checkout.state is State.RELEASED else ", your changes are in")
    if action != "none":
        return f"{action}; to go back: --reverse"
    return {
        State.RELEASED: "not patched; nothing was changed",
        State.PATCHED: "patched already",
        State.MERGED: "patched already, and you have changed it, too",
        State.PARTLY: "patched in part: `megatron-dynapipe patch` patches the rest, --reverse takes the patches out",
    }.get(checkout.state, "not all files are as known; nothing was changed")
