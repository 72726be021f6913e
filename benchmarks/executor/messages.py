"""Messages and synchronisations of an iteration over micro-batches of varying shape, against Megatron's.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.executor.messages [--pairs 200]

Megatron's 1F1B runs them with `variable_seq_lengths`: before each tensor it sends the tensor's shape, waits for the
device and reads the shape. The executor runs the list of the same 1F1B order. Both train the same GPT in the same
processes. Printed, in one iteration over all ranks: what was sent, what was waited for, and what the host read from
tensors; then the ratio of iteration times, as `overhead.py` measures it, without counting.
"""

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.executor import overhead, pairs
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, Shape

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
"""Ways in which the host asks for a tensor's values: on a GPU each waits for the device."""
COUNTED = (
    "tensor messages",
    "tensor bytes",
    "shape messages",
    "device synchronisations",
    "reads of tensors",
    "waits for transfers",
)


def draw_shapes(options: argparse.Namespace) -> list[Shape]:
    """Micro-batches of about as many tokens each, their lengths from an eighth of the longest."""
    draw = np.random.default_rng(options.seed)
    shapes = []
    for _ in range(options.micro_batches):
        length = int(draw.integers(options.length // 8, options.length + 1)) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        length = max(length, LENGTH_MULTIPLE)
        shapes.append(Shape(max(options.size * options.length // length, 1), length))
    return shapes


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what this rank sends, waits for and reads, for as long as the block lasts."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:

        def replace(owners: tuple[Any, ...], name: str, make: Callable[[Any], Any]) -> None:
            for owner in owners:
                stack.callback(setattr, owner, name, getattr(owner, name))
            made = make(getattr(owners[0], name))
            for owner in owners:
                setattr(owner, name, made)

        def counted(what: str) -> Callable[[Any], Any]:
            def make(function: Any) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    counts[what] += 1
                    return function(*arguments, **named)

                return call

            return make

        def sends(function: Any) -> Any:
            def isend(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
                if tensor.is_floating_point():
                    counts["tensor messages"] += 1
                    counts["tensor bytes"] += tensor.nbytes
                else:
                    counts["shape messages"] += 1
                return function(tensor, *arguments, **named)

            return isend

        # Both names of the same function: P2POp compares what it is given with the module's own.
        replace((dist, distributed_c10d), "isend", sends)
        replace((dist.Work,), "wait", counted("waits for transfers"))
        replace((torch.cuda,), "synchronize", counted("device synchronisations"))
        for name in READS:
            replace((torch.Tensor,), name, counted("reads of tensors"))
        yield counts


def count(iteration: pairs.Iteration) -> dict[str, int]:
    """One iteration's counts, over all ranks."""
    iteration()  # first uses do more
    with counting() as counts:
        iteration()
    total = torch.tensor([counts[what] for what in COUNTED])
    gathered = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total, group=dist.new_group(backend="gloo"))
    return dict(zip(COUNTED, torch.stack(gathered).sum(0).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pairs.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with overhead.processes() as device:
        shapes = draw_shapes(options)
        theirs, ours = overhead.runners([overhead.build(options, device, varying=True)], options, shapes, device)
        counts = {"megatron": count(theirs), "executor": count(ours)}
        result = pairs.measure(options, "megatron", theirs, ours)
        pairs.report(options, {"shapes": [tuple(s)[:2] for s in shapes], "counts": counts, **result})
        if dist.get_rank() == 0:
            for what in COUNTED:
                print(f"{what:>24}: Megatron {counts['megatron'][what]:8}, executor {counts['executor'][what]:8}")


if __name__ == "__main__":
    main()
