"""The entry point: parses arguments, runs one command, turns errors into one line, a hint and an exit code.

Exit codes: 0 fine; 1 a problem was found in what was checked; 2 it could not run. Data goes to stdout, everything
else to stderr.
"""

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, NoReturn, Protocol, cast, override

from megatron_dynapipe import __version__
from megatron_dynapipe.cli.examples import PROGRAM, add_examples
from megatron_dynapipe.errors import DynaPipeError
from megatron_dynapipe.extras import missing

COMMANDS = (
    *("doctor", "data", "plan", "compare", "tune", "orchestrate", "launch", "verify", "show", "report", "store"),
    *("cost_model", "profile", "convert", "patch"),
)
"""The modules of `megatron_dynapipe.cli` that are commands, in the order of `--help` (`cost_model`: `cost-model`)."""

EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130

# The type of `subparsers` in a command's `add_parser`; argparse's own name for it is private.
type SubParsers = "argparse._SubParsersAction[Parser]"


class Command(Protocol):
    """A module that is a command."""

    def add_parser(self, subparsers: SubParsers) -> None:
        """Declare the command's name and arguments; set no defaults of `func`."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code. Raises `DynaPipeError` for what the user can correct."""


class UsageError(DynaPipeError):
    """Arguments that cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint, with full option names only.

    Subcommands' parsers are of this class too.
    """

    def __init__(self, **settings: object) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    @override
    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Refuse unknown arguments here, where the command's own options are known and can be suggested."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    @override
    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` where argparse would print its usage and exit."""
        raise UsageError(message, hint=_nearest(message, self._option_string_actions) or f"see `{self.prog} --help`")


def _nearest(message: str, options: Iterable[str]) -> str | None:
    """A guess at what was meant by a name that argparse does not know."""
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    if choice:
        known = re.findall(r"[\w-]+", choice[2])
        close = difflib.get_close_matches(choice[1], known, n=1)
    elif option:
        close = difflib.get_close_matches(option[1], list(options), n=1)
    else:
        return None
    return f"did you mean {close[0]}?" if close else None


def build_parser() -> argparse.ArgumentParser:
    """The whole command line's parser."""
    parser = Parser(prog=PROGRAM, description="Dynamic pipelines for Megatron-LM.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        before = set(subparsers.choices)
        module = _command(name)
        module.add_parser(subparsers)
        for added in set(subparsers.choices) - before:
            subparsers.choices[added].set_defaults(run=module.run)
    add_examples(parser)
    return parser


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"megatron_dynapipe.cli.{name}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DynaPipeError as error:
        _report(error, sys.stderr)
        return EXIT_CANNOT_RUN
    except ModuleNotFoundError as error:  # what an extra brings; anything else is a fault of ours
        if (told := missing(error)) is None:
            raise
        _report(told, sys.stderr)
        return EXIT_CANNOT_RUN
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:  # a full disk, a folder that cannot be written: never a fault of ours
        where = f"{error.filename}: " if error.filename else ""
        _report(DynaPipeError(f"{where}{error.strerror or error}"), sys.stderr)
        _drop_output()
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """What cannot be written to stdout is dropped here: Python's flush at exit would complain of it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: DynaPipeError, stream: IO[str]) -> None:
    print(f"error: {error.message}", file=stream)
    if error.hint is not None:
        print(f"hint: {error.hint}", file=stream)
