"""Two ways to run an iteration on all ranks, timed in turns."""

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import in_turns, interval, wall_clock

Iteration = Callable[[], object]
"""Runs one iteration."""


def timed(function: Callable[[], object]) -> float:
    """Seconds from all ranks' common start to the end of the slowest."""

    def together() -> None:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return wall_clock(together)


def measure(options: argparse.Namespace, name: str, theirs: Iteration, ours: Iteration) -> dict[str, object]:
    """Times of both, in turn; `name` is whose the other one is."""
    for _ in range(options.warm_up):
        theirs()
        ours()
    pairs = in_turns(theirs, ours, options.pairs, timed=timed)
    low, ratio, high = interval(pairs)
    medians = dict(zip((f"{name}_ms", "executor_ms"), (np.median(pairs, axis=0) * 1e3).tolist(), strict=True))
    return {"pairs": options.pairs, **medians, "ratio": ratio, "interval_95": [low, high]}


DEFAULTS = {
    "pairs": 200,
    "warm-up": 10,
    "micro-batches": 8,
    "layers": 4,
    "hidden": 128,
    "vocabulary": 512,
    "length": 128,
    "size": 4,
}


def add_arguments(parser: argparse.ArgumentParser, **changes: int) -> None:
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=changes.get(name.replace("-", "_"), default))


def report(options: argparse.Namespace, result: dict[str, object]) -> None:
    """Print what was found, on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({"stages": dist.get_world_size(), **vars(options), **result}))
        print(f"ratio {result['ratio']:.3f}, 95% {result['interval_95']}", file=sys.stderr)
