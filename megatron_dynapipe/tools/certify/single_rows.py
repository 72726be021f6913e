"""The samples of a recipe's iterations one by one, as Megatron-Bridge takes micro-batches."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.data.spans import LossOn, sequence
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import SplitSettings

Row = dict[str, Tensor | None]


def single_rows(data: Path, split: SplitSettings) -> Iterator[Row]:
    """Every sample that a split trains on, in order, from its first iteration on.

    Args:
        data: the dataset folder.
        split: what decides its samples.

    Yields:
        Tokens, labels, loss mask and positions, [1, positions] each.
    """
    sampler = split_sampler(data, split)
    reader = open_split(data, split.name, split.sampler.family)
    loss_on = LossOn(read_meta(data).loss)
    for iteration in itertools.count(split.first_iteration):
        batch = sampler.batch(iteration)
        for sample, length in zip(batch.sample_ids.tolist(), batch.input_lengths.tolist(), strict=True):
            inputs, targets = (part.astype(np.int64) for part in reader[sample])
            yield _row(*sequence(sampler.cutter, sample, (inputs, targets), length, loss_on))


def _row(tokens: Any, counts: Any) -> Row:
    length = max(len(tokens) - 1, 1)
    made = {name: torch.zeros(1, length, dtype=torch.int64) for name in ("tokens", "labels")}
    mask = torch.zeros(1, length)
    for row, values in ((made["tokens"], tokens[:-1]), (made["labels"], tokens[1:]), (mask, counts[1:])):
        row[0, : len(values)] = torch.from_numpy(values)
    return {**made, "loss_mask": mask, "position_ids": torch.arange(length)[None], "attention_mask": None}
