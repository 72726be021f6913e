"""`patch`: apply, check, merge or reverse the patches on a Megatron-LM checkout."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import PatchError

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.patching import Survey

FORMAT = "dynapipe-patch/2"


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("patch", help="apply, check, merge or reverse the patches on a Megatron-LM checkout")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the folder that holds megatron/")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="say what each file is, and change nothing")
    action.add_argument("--reverse", action="store_true", help="restore the files as they were")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge with changes of yours (three-way in a git checkout), train two ranks for two iterations on the CPU,"
        " and put the files back if that fails; with --reverse, take the patches out and keep the changes",
    )
    parser.add_argument("--json", action="store_true", help="print the result for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if `--check` finds a checkout that cannot be patched."""
    from megatron_dynapipe.patching import load_all, survey

    if args.check:
        return _check(args.checkout, as_json=args.json)
    found = survey(args.checkout, load_all())
    done = _act(found, args)
    now = survey(args.checkout, load_all())
    print(json.dumps(_result(now, done, was=found.state), indent=2) if args.json else _as_text(now, done))
    return 0


def _check(folder: Path, *, as_json: bool) -> int:
    """Print what a checkout is; 1 if it cannot be patched."""
    from megatron_dynapipe.patching import load_all, refusal, survey

    found, error = None, None
    try:
        found = survey(folder, load_all())
        error = refusal(found, load_all()) if _is_mixed(found) else None
    except PatchError as raised:
        error = raised
    if as_json:
        known = _result(found, "none", was=found.state) if found else {"format": FORMAT, "checkout": str(folder)}
        refused = {"error": error.message, "hint": error.hint} if error else {}
        print(json.dumps(known | refused, indent=2))
    else:
        if found:
            print(_as_text(found, "none"))
        if error:
            print(error, file=sys.stderr)
    return int(error is not None)


def _is_mixed(found: "Survey") -> bool:
    from megatron_dynapipe.patching import State

    return found.state in (State.MODIFIED, State.MISSING)


def _act(found: "Survey", args: argparse.Namespace) -> str:
    """Change what is to be changed; what was done."""
    from megatron_dynapipe.patching import Checkout, State, examine, load_all, merge, merged
    from megatron_dynapipe.patching.applying import exchange

    if _is_mixed(found) and args.merge:
        if args.reverse:
            exchange(found.folder, merged(found, reverse=True))
            return "reversed and kept your changes"
        from megatron_dynapipe.cli.smoke_test import train_two_ranks

        print("merged; training two ranks on the CPU for two iterations", file=sys.stderr)
        merge(found, train_two_ranks)
        return "merged"
    checkout: Checkout = examine(found.folder, load_all())
    if args.reverse and checkout.is_patched:
        checkout.reverse()
        return "reversed"
    if not args.reverse and checkout.state in (State.RELEASED, State.OUTDATED):
        checkout.apply()
        return "applied"
    return "none"


def _result(now: "Survey", done: str, *, was: str) -> dict[str, object]:
    """For `--json`: `found` is the checkout's state before, `files` are as they are now."""
    patches = [
        {"file": p.path.name, "subject": p.subject, "files": list(p.files), "added": p.added, "removed": p.removed}
        for p in now.applied.patches
    ]
    files = [
        {"name": file.name, "state": file.state, "releases": list(file.content.releases) if file.content else []}
        for file in now.files
    ]
    result = {"format": FORMAT, "checkout": str(now.folder), "action": done, "says": now.says}
    details = {"version": now.series.version, "found": was, "files": files, "patches": patches}
    return result | details | {"error": None, "hint": None}


def _as_text(found: "Survey", done: str) -> str:
    ends = {
        "applied": "applied; to go back: --reverse",
        "merged": "merged, and two ranks train; to go back: --reverse",
        "reversed": "reversed: the files are as they were",
        "reversed and kept your changes": "reversed: the patches are out, your changes are in",
        "none": _nothing_done(found),
    }
    lines = [f"{found.folder}: Megatron {found.says}, patches of {found.series.version}"]
    lines += [f"  {file}" for file in found.files]
    lines += [f"  patch: {p.subject} ({', '.join(p.files)}: +{p.added} -{p.removed})" for p in found.applied.patches]
    return "\n".join([*lines, ends[done]])


def _nothing_done(found: "Survey") -> str:
    from megatron_dynapipe.patching import State

    if found.record is not None and not found.record.is_tried:
        return "an earlier --merge did not end: --reverse puts the files back, then --merge again"
    return {
        State.RELEASED: "not patched; nothing was changed",
        State.PATCHED: "patched already",
        State.OUTDATED: "patched by an earlier release; run `megatron-dynapipe patch` on it to patch it anew",
        State.MERGED: "merged and tried already",
    }.get(found.state, "not all files are as known; nothing was changed")
