"""`completion`: what a shell needs to complete commands, flags and file names."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("completion", help="print the completion script of a shell")
    parser.add_argument("shell", choices=SHELLS, help="the shell; it reads the script from its folder of completions")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from megatron_dynapipe.cli.main import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))
    return 0
