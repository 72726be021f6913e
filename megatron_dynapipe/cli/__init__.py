"""The command line: thin commands over the library.

Each command is a module with `add_parser(subparsers)` and `run(args) -> int`, which returns the exit code and raises
`DynaPipeError` for what the user can correct, listed in `main.COMMANDS`. Modules
import the standard library and `errors` only; everything else is imported inside `run`, so that `--help` is quick.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# The type of `subparsers` in a command's `add_parser`; argparse's own name for it is private.
type SubParsers = "argparse._SubParsersAction[Any]"

MOST = 10**6
"""Of layers, ranks, widths and lengths: no model has as many, and sums of their costs stay inside 64 bits."""
MOST_REAL = 1e9
"""Of megabytes, Gbit/s and microseconds."""


def number[N: (int, float)](kind: type[N], least: N, most: N, *, above: bool = False) -> Callable[[str], N]:
    """A type of arguments: numbers from `least` (`above`: greater ones) to `most`."""
    bounds = f"{'above' if above else 'from'} {least:g} {'and up ' * above}to {most if kind is int else f'{most:g}'}"

    def parse(text: str) -> N:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and not (above and value == least):
                return value
        raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text}")

    return parse


positive = number(int, 1, MOST)
not_negative = number(int, 0, 10**9)
above_zero = number(float, 0.0, MOST_REAL, above=True)

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
