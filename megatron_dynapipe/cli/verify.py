"""`verify`: check that a plan file can run, or say what is wrong with it."""

import argparse
from pathlib import Path

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.store.codec import decode_plan, digest
from megatron_dynapipe.ways.rules import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("plan", type=Path, metavar="FILE", help="a whole iteration's plan")


def run(args: argparse.Namespace) -> int:
    """Verify the file; 1 with the reason if it is not a plan that can run."""
    try:
        plan = decode_plan(read_bounded(args.plan))
        verify(plan)
    except PlanError as error:
        print(f"{args.plan}: {error}")
        return 1
    totals = plan.totals
    replicas = len(plan.replicas)
    print(
        f"{args.plan}: iteration {plan.iteration} can run: {totals.samples} samples in "
        f"{sum(totals.micro_batches)} micro-batches on {replicas} replica{'s' * (replicas > 1)} of "
        f"{plan.pipeline_stages} stages, digest {digest(plan)}"
    )
    return 0
