"""Each of Megatron's flags in a planned run: it is taken, refused, or said to have no effect.

All of them stand in `megatron_flags.txt`. A flag that is not there has not been decided on: a test holds the file
against the installed Megatron, so that a new flag is noticed before a user gives it.
"""

import argparse
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, in the folder of checkpoints: the iteration of the last complete one."""
RELEASE = "release"
"""A tracker's word for a checkpoint that no run saved, and its folder's name."""
FILE = Path(__file__).with_suffix(".txt")
WITHOUT_EFFECT = "without effect"
REFUSED = "refused"
"""How the lines of the file begin that say what is done with the flags below them; others are taken."""


@functools.cache
def decisions() -> dict[str, tuple[str, str]]:
    """For each of Megatron's flags what is done with it, in the file's words, and why; no reason where it is taken."""
    headings = {flag: heading for heading, flags in under_headings(FILE) for flag in flags.split()}
    return {flag: (outcome, why) for flag, text in headings.items() for outcome, _, why in [text.partition(": ")]}


def under_headings(file: Path) -> Iterator[tuple[str, str]]:
    """(heading, line) of every indented line of a text; headings have no indent, and # begins a comment."""
    heading = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            yield heading, line.strip()
        elif line and not line.startswith("#"):
            heading = line


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's arguments as they are, whatever is added to it, or changed of its defaults, afterwards."""
    return [copy.copy(action) for action in parser._actions if action.dest != "help"]  # argparse has no public list


def flag_of(action: argparse.Action) -> str:
    """The name under which an argument stands in the table: its first long one."""
    return next(name for name in action.option_strings if name.startswith("--"))


def changed_flags(args: argparse.Namespace, known: Sequence[argparse.Action]) -> list[str]:
    """The arguments that have another value than Megatron's default.

    Of several that set one attribute it is the one that sets it to this value.
    """
    of_attribute: dict[str, list[argparse.Action]] = {}
    for action in known:
        of_attribute.setdefault(action.dest, []).append(action)
    flags = []
    for name, setters in of_attribute.items():
        default = setters[0].default  # argparse takes the first one's
        value = getattr(args, name, default)
        if value != default:
            flags.append(flag_of(next((action for action in setters if action.const == value), setters[0])))
    return flags


def check(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> list[str]:
    """Refuse what a planned run would not do as the flag says.

    Returns:
        For each argument without effect that was given, the flag and why: "--split (samples come from …)".

    Raises:
        ConfigError: names the flag, the reason and what to do.
    """
    places = {
        REFUSED: True,
        f"{REFUSED} outside a patched checkout": not args.use_dynapipe,  # the entry scripts need no such flag
        f"{REFUSED} and --transformer-impl local": args.transformer_impl == "local",
        f"{REFUSED} for a T5": family is ModelFamily.T5,
    }
    ignored = []
    for flag in changed_flags(args, known):
        outcome, reason = decisions().get(flag, ("", ""))
        if places.get(outcome):
            where = outcome.removeprefix(REFUSED)
            raise ConfigError(f"{flag} cannot be used with DynaPipe{where}: {reason}", hint=f"remove {flag}")
        if outcome == WITHOUT_EFFECT:
            ignored.append(f"{flag} ({reason})")
    return ignored
