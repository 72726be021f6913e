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
from megatron_dynapipe.plan.codec import decode_entry, encode, encode_entries
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.sampling import Batches, LastBatch
from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.failure import PlannerFailure
from megatron_dynapipe.store import PlanKeys, PlanStore, StoreAddress, open_store

_NOT_TAKEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")
_SPLIT = "train"


class DynaPipeDataLoader:
    """Iterating gives `(micro_batches, plan)` of this rank's replica, once per global batch of an epoch.

    Workers (`num_workers`) plan and collate ahead of training. Every rank plans for itself, which gives all of them
    the same plan; with a store, each plan is made once, by one rank after another, and fetched by the others.

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
        store: address of a plan store that all nodes reach, e.g. "redis://host:29500".
        job: name of this launch in the store, the same on every rank.
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
        store: str | None = None,
        job: str = "modules",
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
        rank = dist.get_rank() if dist.is_initialized() else 0
        stage, replica = divmod(rank, planner.replicas)
        plans = None if store is None else PublishedPlans(StoreAddress(store), job, planner, rank=rank)
        self._planned = _Planned(dataset, self._lengths, planner, collate_fn or Pad(), replica, stage, plans)
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
        items = _Iterations(self._planned, numbered[self._skipped :])
        self.set_epoch(self.epoch + 1)
        loader = DataLoader(items, batch_size=None, shuffle=False, collate_fn=_as_it_is, **self._arguments)
        for micro_batches, plan in loader:
            yield micro_batches, decode_entry(plan)

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


class PublishedPlans:
    """A rank's plans through a store: rank i mod ranks plans iteration i. Connects at its first use, in a worker.

    Args:
        address: of the store.
        job: name of this launch.
        planner: of all ranks alike.
        rank: of this process.
        deadline_s: how long a plan is waited for.
    """

    def __init__(
        self, address: StoreAddress, job: str, planner: ModulePlanner, *, rank: int, deadline_s: float = 300.0
    ) -> None:
        self._address, self._planner, self._rank = address, planner, rank
        self._keys = PlanKeys(job=job, settings_digest=planner.digest)
        self._deadline_s = deadline_s
        self._store: PlanStore | None = None

    def entry(self, iteration: int, lengths: Sequence[int], *, replica: int, stage: int) -> StageEntry:
        """The share of this rank in an iteration; it is dropped from the store.

        Raises:
            PlanningError: the batch cannot be planned; on ranks that wait for it, a PlannerFailedError that says so.
            StoreTimeoutError: the plan did not come.
        """
        if self._store is None:
            self._store = open_store(self._address)
        store, ranks = self._store, self._planner.replicas * self._planner.stages
        if iteration % ranks == self._rank:
            try:
                plan = self._planner.plan(lengths, iteration)
            except Exception as error:
                failure = PlannerFailure.of(error, planner=self._rank, doing=f"planning iteration {iteration}")
                store.put_first(self._keys.error, failure.encode())
                raise
            for to_replica, to_stage, data in encode_entries(plan):
                store.put(self._key(iteration, to_replica, to_stage), data)
        client = PlanClient(store, self._keys, replica=replica, stage=stage, deadline_s=self._deadline_s)
        entry = client.fetch(_SPLIT, iteration)
        store.delete([self._key(iteration, replica, stage)])
        return entry

    def _key(self, iteration: int, replica: int, stage: int) -> str:
        return self._keys.plan(split=_SPLIT, iteration=iteration, replica=replica, stage=stage)


class _Planned:
    """One iteration's plan and this replica's micro-batches; runs in the loader's workers."""

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int],
        planner: ModulePlanner,
        collate: Collate,
        replica: int,
        stage: int,
        plans: PublishedPlans | None,
    ) -> None:
        self._dataset, self._lengths, self._planner, self._collate = dataset, lengths, planner, collate
        self._replica, self._stage, self._plans = replica, stage, plans

    def __call__(self, iteration: int, ids: Sequence[int]) -> tuple[list[Any], bytes]:
        lengths = [self._lengths[sample] for sample in ids]
        if self._plans is not None:
            entry = self._plans.entry(iteration, lengths, replica=self._replica, stage=self._stage)
        else:
            plan = self._planner.plan(lengths, iteration)
            entry = StageEntry.of(plan, self._replica, self._stage, plan_digest=self._planner.digest)
        micro_batches = [
            self._collate([self._dataset[ids[place]] for place in each.sample_ids], each.shape.input_length)
            for each in entry.micro_batches
        ]
        return micro_batches, encode(entry)


class _Iterations(Dataset[Any]):
    """An epoch's iterations as a dataset, for PyTorch's loader to spread over its workers."""

    def __init__(self, planned: _Planned, batches: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._planned, self._batches = planned, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[list[Any], bytes]:
        return self._planned(*self._batches[index])


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
