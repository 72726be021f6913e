"""`certify`: prove that a run trains what one process trains."""

import argparse
import sys

from megatron_dynapipe.cli import SubParsers, print_json


def add_parser(subparsers: SubParsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "certify",
        help="prove that a run trains exactly what one process without plans trains",
        epilog="Flags of the training command follow after --. The run's own model trains a few iterations of its own"
        " data as planned, and in one process without pipeline, packing, pieces or plans, from the same weights;"
        " losses, gradients, isolation of samples and repetition are compared in fp32, and in bf16 or fp16 where the"
        " run has it.",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (default: the fewest that the layout takes)")
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="iterations (%(default)s)")
    parser.add_argument("--full", action="store_true", help="do not reduce a model that is too large for one process")
    parser.add_argument("--deadline-s", type=float, default=1800.0, metavar="S", help="of each run (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the certificate for a machine to read")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="the run's flags")


def run(args: argparse.Namespace) -> int:
    """Compare and print the table; 1 if anything differs by more than rounding."""
    from megatron_dynapipe.tools.certify.command import certify

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    certificate = certify(
        args.flags,
        ranks=args.ranks,
        iterations=args.iterations,
        full=args.full,
        deadline_s=args.deadline_s,
        said=say,
    )
    missed = [check.name for check in certificate.checks if not check.holds]
    if args.json:
        print_json({"format": "dynapipe-certificate/1", "exact": not missed, "certificate": certificate})
        return 1 if missed else 0
    for line in certificate.reduced:
        print(f"reduced: {line}")
    width = max(len(check.name) for check in certificate.checks)
    print(f"{'check':<{width}}  difference  allowed")
    for check in certificate.checks:
        mark = "" if check.holds else "MISS: "
        print(f"{check.name:<{width}}  {check.error:10.1e}  {check.allowed:7.1e}  {mark}{check.where}".rstrip())
    print(f"not exact: {', '.join(missed)}" if missed else "exact: this run trains what one process trains")
    return 1 if missed else 0
