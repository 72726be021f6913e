"""A data loader whose batches come as micro-batches, planned by the measured costs of the model's segments.

loader = DynaPipeDataLoader(dataset, tokens_per_batch=65_536, planner=planner, num_workers=2)
for micro_batches, plan in loader:
    loss, overflow = pipeline.run(micro_batches, plan)
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from megatron_dynapipe.choosing.planner import planner_with
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.network import GLOO_RULES, Network, TransferRules, cuda_rules
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch
from megatron_dynapipe.modules.inputs import Batch, batch_rows, has_rows
from megatron_dynapipe.sampling.batches import Batches, LastBatch
from megatron_dynapipe.segments import SegmentCosts, segment_settings
from megatron_dynapipe.store.codec import decode_entry, encode
from megatron_dynapipe.store.entry import StageEntry

PAD_VALUES: Mapping[str, int] = {"labels": -100, "label": -100, "targets": -100, "attention_mask": 0}
"""Values that fill up tensors of these names; others are filled with 0."""


type Collate = Callable[[Sequence[Any], int], Any]
"""From samples and the planned length, in positions, to the batch; raises DataError where a sample is longer."""


class Pad:
    """Samples as rows, each tensor's first dimension filled up to the planned length where it is one of positions.

    Args:
        values: fill values by name; for tuples, by place.
        mask: name under which to add a mask of real positions, int64[rows, length].
    """

    def __init__(self, values: Mapping[Any, float] = PAD_VALUES, *, mask: str | None = None) -> None:
        self._values = values
        self._mask = mask

    def __call__(self, samples: Sequence[object], length: int) -> object:
        """Rows of samples; raises DataError where one is longer."""
        entries = [_entries(sample) for sample in samples]
        batch = {key: self._rows([entry[key] for entry in entries], key, length) for key in entries[0]}
        if self._mask is not None:
            lengths = torch.tensor([_positions(sample) for sample in samples])
            batch[self._mask] = (torch.arange(length) < lengths[:, None]).long()
        return batch if isinstance(samples[0], Mapping) or self._mask is not None else tuple(batch.values())

    def _rows(self, values: Sequence[Any], key: Any, length: int) -> Any:
        if not isinstance(values[0], torch.Tensor) or values[0].dim() == 0:
            return default_collate(list(values))
        longest = max(len(value) for value in values)
        if longest > length:
            raise DataError(f"expected samples of at most the planned {length} positions, got {longest} in {key!r}")
        first = values[0]
        rows = first.new_full((len(values), length, *first.shape[1:]), self._values.get(key, 0))
        for row, value in zip(rows, values, strict=True):
            row[: len(value)] = value
        return rows


def _entries(sample: object) -> dict[object, object]:
    if isinstance(sample, Mapping):
        return dict(sample)
    return dict(enumerate(sample if isinstance(sample, tuple | list) else (sample,)))


def _positions(sample: object) -> int:
    """Positions of a sample: the first dimension of its first tensor that has one."""
    for value in _entries(sample).values():
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    raise DataError(f"expected a sample with a tensor whose length counts, got {type(sample).__name__}")


_NOT_TAKEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "collate_fn")


class ModulePlanner:
    """A `Planner` for the stages of a divided model; every virtual stage counts as one layer with its own costs.

    Args:
        costs: the segments' costs, or the path of their file.
        stage_of: the virtual stage of each segment, `part.stage_of`.
        stages, replicas: ranks of a pipeline, and its replicas.
        memory_limit_bytes: memory of one device.
        network: links between devices; by default the links that the costs were measured with.
        schedule: how passes are ordered.
        transfers: when transfers are started; None takes the rules of GPUs if there is one, else of gloo.
    """

    def __init__(
        self,
        costs: SegmentCosts | str | Path,
        stage_of: Sequence[int],
        *,
        stages: int,
        replicas: int = 1,
        memory_limit_bytes: int,
        network: Network | None = None,
        schedule: ScheduleSettings | None = None,
        transfers: TransferRules | None = None,
    ) -> None:
        self.stages = stages
        self.replicas = replicas
        costs = costs if isinstance(costs, SegmentCosts) else SegmentCosts.load(Path(costs))
        settings = segment_settings(
            costs,
            stage_of,
            stages=stages,
            replicas=replicas,
            memory_limit_bytes=memory_limit_bytes,
            network=network,
            schedule=schedule,
        )
        if transfers is None:
            transfers = cuda_rules(os.environ) if torch.cuda.is_available() else GLOO_RULES
        settings = msgspec.structs.replace(settings, transfers=transfers)
        of_stages = costs.of_stages(stage_of)
        tables = [of_stages.tables(tensor_parallel=1, recompute=mode) for mode in settings.recompute]
        state = np.array(settings.model_state_bytes, np.int64)
        self.planner = planner_with(settings, tables, state, costs_digest=of_stages.digest)
        self._alone = self.planner
        if replicas > 1:
            alone = msgspec.structs.replace(settings, data_parallel=1)
            self._alone = planner_with(alone, tables, state, costs_digest=of_stages.digest)

    @property
    def digest(self) -> str:
        """Digest of everything except lengths that plans depend on."""
        return self.planner.digest

    def plan(self, lengths: Sequence[int], iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """The plan of a global batch over all replicas; raises PlanningError and InfeasibleError.

        `lengths` has a number of positions for each sample; a micro-batch's sample ids are places in it.
        """
        return self.planner.plan(GlobalBatch.of_positions(lengths, iteration), iteration, forward_only=forward_only)

    def share(self, batch: Batch, *, forward_only: bool = False) -> tuple[list[dict[str, Any]], IterationPlan]:
        """One replica's batch as planned micro-batches, each trimmed to the length of its longest sample.

        Lengths are the sums of the batch's "attention_mask", if it has one, else the second dimension of its first
        tensor. Padding is expected at the end of each row.
        """
        lengths = _lengths(batch)
        plan = self._alone.plan(GlobalBatch.of_positions(lengths, 0), 0, forward_only=forward_only)
        return [_rows(batch, micro_batch) for micro_batch in plan.replicas[0].micro_batches], plan


def _lengths(batch: Batch) -> list[int]:
    rows = batch_rows(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return [max(int(n), 1) for n in mask.sum(1).tolist()]
    widths = [value.shape[1] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 1]
    if not widths:
        raise DataError("expected a batch with a tensor of samples × positions, or an attention_mask, to plan")
    return [widths[0]] * rows


def _rows(batch: Batch, micro_batch: MicroBatch) -> dict[str, Any]:
    """The samples of a micro-batch, cut off at its longest one's end."""
    rows = batch_rows(batch)
    width = max(_lengths(batch))
    ids = torch.tensor(micro_batch.sample_ids)
    longest = max(micro_batch.input_lengths) - 1

    def cut(value: Any) -> Any:
        if not has_rows(value, rows):
            return value
        return value[ids][:, :longest] if value.dim() > 1 and value.shape[1] >= width else value[ids]

    return {key: cut(value) for key, value in batch.items()}


class DynaPipeDataLoader:
    """Iterating gives `(micro_batches, plan)` of this rank's replica, once per global batch of an epoch.

    Workers (`num_workers`) plan and collate ahead of training. Every rank plans for itself, which gives all of them
    the same plan.

    Args:
        dataset: with a length and items: dicts by names of the model's arguments, or tuples, of tensors.
        global_batch_size: samples of an iteration over all replicas, or
        tokens_per_batch: positions of an iteration's samples together, at most.
        planner: makes micro-batches and the order of their passes.
        lengths: every sample's, in positions, or a function from a sample to its length; by default the first dimension
            of its first tensor. Without numbers, the dataset is read through once.
        collate_fn: from samples and the planned length to a batch; by default `Pad()`.
        shuffle: draw another order of the samples for every epoch.
        seed: draws that order.
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
        if refused := [name for name in _NOT_TAKEN if name in arguments]:
            raise ConfigError(f"expected no {refused[0]}: global batches and micro-batches are made by this loader")
        self._lengths = _all_lengths(dataset, lengths)
        self._size = global_batch_size
        self._tokens = tokens_per_batch
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self.epoch = 0
        self._skipped = 0
        self._stage, self._replica = divmod(dist.get_rank() if dist.is_initialized() else 0, planner.replicas)
        self._dataset = dataset
        self._planner = planner
        self._collate = collate_fn or Pad()
        self._arguments = arguments

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next; its order depends on the seed and its number alone."""
        self.epoch = epoch
        self._skipped = 0

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
        items: Any = numbered[self._skipped :]
        make: Any = self._planned  # without batch_size it is called with one item
        self.set_epoch(self.epoch + 1)
        loader = DataLoader(items, batch_size=None, shuffle=False, collate_fn=make, **self._arguments)
        for micro_batches, plan in loader:
            yield micro_batches, decode_entry(plan)

    def _planned(self, numbered: tuple[int, Sequence[int]]) -> tuple[list[Any], bytes]:
        """Micro-batches of this replica and its plan, of an iteration and its samples; runs in a worker."""
        iteration, ids = numbered
        plan = self._planner.plan([self._lengths[sample] for sample in ids], iteration)
        entry = StageEntry.of(plan, self._replica, self._stage, plan_digest=self._planner.digest)
        micro_batches = [
            self._collate([self._dataset[ids[place]] for place in planned.sample_ids], planned.shape.input_length)
            for planned in entry.micro_batches
        ]
        return micro_batches, encode(entry)

    def _batches(self) -> list[list[int]]:
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


def _all_lengths(dataset: Any, lengths: Sequence[int] | Callable[[Any], int] | None) -> Sequence[int]:
    if lengths is None or callable(lengths):
        measure = lengths or _positions
        lengths = [measure(dataset[index]) for index in range(len(dataset))]
    if len(lengths) != len(dataset) or not len(lengths):
        raise DataError(f"expected a length for each of {len(dataset)} samples, at least one, got {len(lengths)}")
    if min(lengths) < 1:
        raise DataError(f"expected samples of at least one position, got one of {min(lengths)}")
    return lengths
