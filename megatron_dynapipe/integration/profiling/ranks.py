"""What ranks measure and tell each other: a layer that they share, together; otherwise each its own, at the same time.

shared        rank 0   point 0    point 1    point 2         means of times, largest of memories
              rank 1   point 0    point 1    point 2
not shared    rank 0   point 0    point 3    point 4         in turns, so that a rank that is slower than the
              rank 1   point 1    point 2    point 5         others is so everywhere
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.integration.profiling.layers import Part
from megatron_dynapipe.integration.profiling.measure import Sample

Values = tuple[int, int, int, int]
"""ns of the forward and the backward of a layer, bytes that it stores and that it has at its peak."""


def communicable() -> torch.device:
    """Where tensors of the default group live."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def at_once(*, shared: bool) -> int:
    """How many points ranks measure at the same time."""
    return 1 if shared else dist.get_world_size()


def measured_by_ranks(
    measures: Sequence[Callable[[], Values | None]], *, turn: int, shared: bool
) -> list[Values | None]:
    """What some measurements give, on all ranks; None where memory was too small.

    Args:
        measures: as many as `at_once` at most, the same on all ranks; which of them a rank runs is its own.
        turn: how often this was called before.
        shared: all ranks run the one that there is.
    """
    if shared:
        return [measure() for measure in measures]
    size = dist.get_world_size()
    mine = (dist.get_rank() + turn) % size
    found = measures[mine]() if mine < len(measures) else None
    words = torch.tensor([0] * 5 if found is None else [1, *found], dtype=torch.int64, device=communicable())
    gathered = [torch.empty_like(words) for _ in range(size)]
    dist.all_gather(gathered, words)
    rows = [[int(word) for word in gathered[(at - turn) % size].tolist()] for at in range(len(measures))]
    return [(row[1], row[2], row[3], row[4]) if row[0] else None for row in rows]


def largest_that_fits(part: Part, run: Callable[[Part], Sample], *, shared: bool) -> Values | None:
    """What measuring the part gives; with a single layer where several do not fit on a rank that shares it."""
    for each in part.from_most_layers:
        try:
            sample: Sample | None = run(each)
        except torch.OutOfMemoryError:
            sample = None
        values = _over_ranks(sample) if shared else _values(sample)
        if values is not None:
            return values
    return None


def _values(sample: Sample | None) -> Values | None:
    if sample is None:
        return None
    return sample.forward_ns, sample.backward_ns, sample.memory.stored_bytes, sample.memory.peak_bytes


def _over_ranks(sample: Sample | None) -> Values | None:
    """Mean times and largest memory over the ranks; None where it did not fit on one of them."""
    values = _values(sample)
    fits = torch.tensor([values is not None], dtype=torch.int64, device=communicable())
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    if not fits.item() or values is None:
        return None
    times = torch.tensor(values[:2], device=communicable())
    dist.all_reduce(times)
    sizes = torch.tensor(values[2:], device=communicable())
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    forward, backward = (int(time) // dist.get_world_size() for time in times)
    stored, peak = (int(size) for size in sizes)
    return forward, backward, stored, peak
