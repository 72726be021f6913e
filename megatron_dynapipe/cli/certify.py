"""`certify`: prove that a run trains what one process trains."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.flags.planning_flags import above_zero, positive

if TYPE_CHECKING:
    from megatron_dynapipe.tools.certify.verdict import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "Flags of the training command follow after --. The run's own model trains a few iterations of its own data as"
        " planned, and in one process without pipeline, packing, pieces or plans, from the same weights; losses,"
        " gradients, steps, isolation of samples and repetition are compared in fp32, losses and gradients in the run's"
        " precision too. Learning rate and weight decay are the certificate's own, so that three steps show. In place"
        " of flags, the script of a recipe of Megatron-Bridge with its words may follow (docs/bridge.md)."
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks of the run (default: enough for two replicas, if there is room)",
    )
    add("--iterations", type=positive, default=3, metavar="N", help="iterations, at least 2 (%(default)s)")
    add("--full", action="store_true", help="do not reduce a model that is too large for one process")
    add("--deadline-s", type=above_zero, default=1800.0, metavar="S", help="of each run (%(default).0f)")
    add("--json", action="store_true", help="print the certificate for a machine to read")
    add("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS|SCRIPT", help="the run's flags, or its script")


def run(args: argparse.Namespace) -> int:
    """Compare and print the table; 1 if anything differs by more than rounding."""
    say = functools.partial(print, file=sys.stderr, flush=True)
    checks, gradients, rates = _certified(args, say)
    missed = [check.name for check in checks if not check.holds]
    if args.json:
        report = {"exact": not missed, "rates": rates, "checks": checks, "gradients": gradients}
        print_json({"format": "dynapipe-certificate/1", **report})
    else:
        print(f"{'check':<24} difference  allowed")
        for check in checks:
            where = check.where if check.holds else f"MISS: {check.where}"
            print(f"{check.name:<24} {check.error:10.1e}  {check.allowed:7.1e}  {where}".rstrip())
        exact = f"exact: this run trains what one process trains; steps were made with {rates}"
        print(f"not exact: {', '.join(missed)}" if missed else exact)
    return 1 if missed else 0


def _certified(args: argparse.Namespace, say: Callable[[str], None]) -> "tuple[list[Check], dict[str, float], str]":
    words = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    if not words or not words[0].endswith(".py"):
        from megatron_dynapipe.tools.certify.command import certify

        settings = {name: getattr(args, name) for name in ("ranks", "iterations", "full", "deadline_s")}
        return certify(args.flags, **settings, said=say)

    from megatron_dynapipe.tools.certify.recipe import certify_recipe

    if args.full:
        raise ConfigError("--full goes with flags: the model of a script is never reduced", hint="leave it out")
    if args.ranks is None:
        raise ConfigError("expected --ranks N with a script, got none", hint="as many as torchrun starts it with")
    return certify_recipe(words, ranks=args.ranks, iterations=args.iterations, deadline_s=args.deadline_s, said=say)
