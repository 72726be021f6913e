"""A data loader whose batches come as planned micro-batches.

loader = DynaPipeDataLoader(dataset, tokens_per_batch=65_536, planner=planner, num_workers=2)
for micro_batches, plan in loader:
    loss, overflow = pipeline.run(micro_batches, plan)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.modules.collate import Collate, Pad, length_of
from megatron_dynapipe.modules.planner import ModulePlanner
from megatron_dynapipe.plan.codec import decode_entry, encode
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.sampling import Batches, LastBatch

_NOT_TAKEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")


class DynaPipeDataLoader:
    """Iterating gives `(micro_batches, plan)` of this rank's replica, once per global batch of an epoch.

    Workers (`num_workers`) plan and collate ahead of training. Every rank plans for itself, which gives all of them
    the same plan.

    Args:
        dataset: with a length and items: dicts by names of the model's arguments, or tuples, of tensors.
        global_batch_size: samples of an iteration over all replicas, or
        tokens_per_batch: positions of an iteration's samples together, at most.
        planner: makes micro-batches and the order of their passes.
        lengths: of every sample, in positions, or a function from a sample to its own; by default the first dimension
            of its first tensor. Without numbers, the dataset is read through once.
        collate_fn: from samples and the planned length to a batch; by default `Pad()`.
        shuffle: draw another order of the samples for every epoch.
        seed: of that order.
        drop_last: leave out an epoch's last, smaller batch.
        **arguments: of `torch.utils.data.DataLoader`.

    Raises:
        ConfigError: both or neither of the sizes, or an argument that this loader decides itself.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        *,
        planner: ModulePlanner,
        lengths: Sequence[int] | Callable[[Any], int] | None = None,
        collate_fn: Collate | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **arguments: Any,
    ) -> None:
        if (global_batch_size is None) == (tokens_per_batch is None):
            raise ConfigError("expected global_batch_size or tokens_per_batch, and not both")
        if taken := [name for name in _NOT_TAKEN if name in arguments]:
            raise ConfigError(f"expected no {taken[0]}: global batches and micro-batches are made by this loader")
        self._lengths = _all_lengths(dataset, lengths)
        self._size, self._tokens = global_batch_size, tokens_per_batch
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch, self._skipped = 0, 0
        self._stage, self._replica = divmod(dist.get_rank() if dist.is_initialized() else 0, planner.replicas)
        self._dataset, self._planner, self._collate = dataset, planner, collate_fn or Pad()
        self._arguments = arguments

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next; its order depends on the seed and its number alone."""
        self.epoch, self._skipped = epoch, 0

    def start_at(self, iteration: int) -> None:
        """Go on at an iteration of the run, counted from 0 over its epochs: with the rest of its epoch next.

        Raises:
            ConfigError: an epoch has no iterations.
        """
        self.set_epoch(0)
        while iteration >= (count := len(self)):
            if not count:
                raise ConfigError("expected an epoch of at least one iteration, got none", hint="drop_last=False")
            iteration -= count
            self.set_epoch(self.epoch + 1)
        self._skipped = iteration

    def __len__(self) -> int:
        """Iterations of the epoch."""
        return len(self._batches())

    def __iter__(self) -> Iterator[tuple[list[Any], StageEntry]]:
        """One epoch; the next call begins the next one."""
        batches = self._batches()
        first = self.epoch << 32  # iterations are numbered apart by epoch
        numbered = [(first + number, ids) for number, ids in enumerate(batches)]
        items = _Iterations(self, numbered[self._skipped :])
        self.set_epoch(self.epoch + 1)
        loader = DataLoader(items, batch_size=None, shuffle=False, collate_fn=_as_it_is, **self._arguments)
        for micro_batches, plan in loader:
            yield micro_batches, decode_entry(plan)

    def _planned(self, iteration: int, ids: Sequence[int]) -> tuple[list[Any], bytes]:
        """Micro-batches of this replica and its plan; runs in a worker."""
        plan = self._planner.plan([self._lengths[sample] for sample in ids], iteration)
        entry = StageEntry.of(plan, self._replica, self._stage, plan_digest=self._planner.digest)
        micro_batches = [
            self._collate([self._dataset[ids[place]] for place in each.sample_ids], each.shape.input_length)
            for each in entry.micro_batches
        ]
        return micro_batches, encode(entry)

    def _batches(self) -> list[list[int]]:
        """Samples of every global batch of the epoch."""
        order = list(range(len(self._lengths)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        positions = np.array([self._lengths[sample] for sample in order], np.int64)
        is_dropped = self._drop_last and (self._size is None or self._size <= len(order))
        batches = Batches(
            len(order),
            samples=self._size,
            tokens=self._tokens,
            lengths=lambda first, stop: positions[first:stop],
            last=LastBatch.DROP if is_dropped else LastBatch.KEEP,
            epochs=1,
        )
        return [order[slice(*batches.bounds(number))] for number in range(batches.count or 0)]


class _Iterations(Dataset[Any]):
    """Iterations of an epoch as a dataset, for PyTorch's loader to spread over its workers."""

    def __init__(self, loader: DynaPipeDataLoader, batches: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[list[Any], bytes]:
        return self._loader._planned(*self._batches[index])


def _as_it_is[T](item: T) -> T:
    """PyTorch would make lists of tuples."""
    return item


def _all_lengths(dataset: Any, lengths: Sequence[int] | Callable[[Any], int] | None) -> Sequence[int]:
    if lengths is None or callable(lengths):
        measure = lengths or length_of
        lengths = [measure(dataset[index]) for index in range(len(dataset))]
    if len(lengths) != len(dataset) or not len(lengths):
        raise DataError(f"expected a length for each of {len(dataset)} samples, at least one, got {len(lengths)}")
    if min(lengths) < 1:
        raise DataError(f"expected samples of at least one position, got one of {min(lengths)}")
    return lengths
