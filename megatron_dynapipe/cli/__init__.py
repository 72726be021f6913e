"""The command line: thin commands over the library.

Each command of `main.COMMANDS` is a module with `add_arguments(parser)` and `run(args) -> int`, which returns the exit
code and raises `DynaPipeError` for what the user can correct. It is imported when the command is asked for. What only
extras bring is imported where it is needed.
"""

import sys
from collections.abc import Iterable, Sequence

import msgspec
from tqdm import tqdm

_DELAY_S = 2.0
"""Seconds above which work has a bar."""


def with_progress[Item](items: Sequence[Item], *, unit: str) -> Iterable[Item]:
    """The items, with a bar on stderr of how many are done; nothing where stderr is not a terminal."""
    bar: Iterable[Item] = tqdm(items, unit=f" {unit}", delay=_DELAY_S, disable=None, leave=False, dynamic_ncols=True)
    return bar


def print_json(report: object) -> None:
    """Print one JSON object to stdout."""
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def say(text: str) -> None:
    """Print to stdout, above a bar if there is one."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
