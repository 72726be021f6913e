"""What dividing every backward pass costs where nothing waits: an iteration in halves against the same one whole.

    OMP_NUM_THREADS=1 python -m benchmarks.executor.divided [--pairs 100] [--length 512] [--micro-batches 8]

One process trains the same GPT on the same packed rows, all backward passes whole or all in halves, a second half right
after its first. Printed is the ratio of times, halves to whole, with a 95% interval from resampling the pairs.
"""

from megatron_dynapipe import cpu

ON_CPU = cpu.enable()

import argparse
import os

import torch

from benchmarks.executor import overhead, pieces
from benchmarks.executor.pairs import add_arguments, measure, report


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    iteration = pieces.iterations(options, device)
    rows: list[tuple[int, pieces.Cuts]] = [(options.length, {})] * options.micro_batches
    return measure(options, "whole", lambda: iteration(rows), lambda: iteration(rows, divided=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, micro_batches=8, length=512, pairs=100)
    options = parser.parse_args()
    os.environ |= pieces.ALONE
    with overhead.processes() as device:
        report(options, compare(options, device))


if __name__ == "__main__":
    main()
