"""`certify`: prove that a run trains what one process trains."""

import argparse
import functools
import sys

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.integration.flags.planning_flags import above_zero, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "Flags of the training command follow after --. The run's own model trains a few iterations of its own data as"
        " planned, and in one process without pipeline, packing, pieces or plans, from the same weights; losses,"
        " gradients, steps, isolation of samples and repetition are compared in fp32, losses and gradients in the run's"
        " precision too. Learning rate and weight decay are the certificate's own, so that three steps show."
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
    add("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="the run's flags")


def run(args: argparse.Namespace) -> int:
    """Compare and print the table; 1 if anything differs by more than rounding."""
    from megatron_dynapipe.tools.certify.command import certify

    settings = {name: getattr(args, name) for name in ("ranks", "iterations", "full", "deadline_s")}
    say = functools.partial(print, file=sys.stderr, flush=True)
    checks, gradients, rates = certify(args.flags, **settings, said=say)
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
