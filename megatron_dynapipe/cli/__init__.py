"""The command line: thin commands over the library.

Each command is a module with `add_parser(subparsers)` and `run(args) -> int`, which returns the exit code and raises
`DynaPipeError` for what the user can correct, listed in `main.COMMANDS`. Modules
import the standard library and `errors` only; everything else is imported inside `run`, so that `--help` is quick.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# The type of `subparsers` in a command's `add_parser`; argparse's own name for it is private.
type SubParsers = "argparse._SubParsersAction[Any]"

_DELAY_S = 2.0
"""What takes longer has a bar."""


def with_progress[Item](items: Sequence[Item], *, unit: str) -> Iterable[Item]:
    """The items, with a bar on stderr of how many are done; nothing where stderr is not a terminal."""
    from tqdm import tqdm

    bar: Iterable[Item] = tqdm(items, unit=f" {unit}", delay=_DELAY_S, disable=None, leave=False, dynamic_ncols=True)
    return bar


def print_json(report: object) -> None:
    """Print one JSON object to stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def say(text: str) -> None:
    """Print to stdout, above a bar if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
