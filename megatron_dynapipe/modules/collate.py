"""From a planned micro-batch's samples to its tensors: padded to one length, or packed into one row."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from megatron_dynapipe.errors import DataError

PAD_VALUES: Mapping[str, int] = {"labels": -100, "label": -100, "targets": -100, "attention_mask": 0}
"""What fills up tensors of these names; others are filled with 0."""


class Collate(Protocol):
    """Makes a micro-batch's tensors."""

    def __call__(self, samples: Sequence[Any], length: int) -> Any:
        """The batch of some samples, planned to be `length` positions long."""
        ...


class Pad:
    """Samples as rows, each tensor's first dimension filled up to the planned length where it is one of positions.

    Args:
        values: fill values by name; for tuples, by place.
        mask: name under which to add a mask of real positions, int64[rows, length].
    """

    def __init__(self, values: Mapping[Any, float] = PAD_VALUES, *, mask: str | None = None) -> None:
        self._values, self._mask = values, mask

    def __call__(self, samples: Sequence[Any], length: int) -> Any:
        """See `Collate`; raises DataError where a sample is longer than planned."""
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


class Pack:
    """Samples one after another in a single row, with positions that begin again at each.

    A model has to keep them apart by `position_ids`, as those of `transformers` do where they are given no mask. The
    first label of each sample but the first is left out, since it would be predicted from the sample before.

    Args:
        values: what fills up the row to the planned length.
        labels: names of tensors of labels.
    """

    def __init__(self, values: Mapping[Any, float] = PAD_VALUES, *, labels: Sequence[str] = ("labels",)) -> None:
        self._values, self._labels = values, labels

    def __call__(self, samples: Sequence[Any], length: int) -> Any:
        """See `Collate`."""
        batch = {
            key: torch.cat([self._apart(sample[key], key, first=not row) for row, sample in enumerate(samples)])[None]
            for key in samples[0]
        }
        lengths = [_positions(sample) for sample in samples]
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        return batch

    def _apart(self, tensor: torch.Tensor, key: str, *, first: bool) -> torch.Tensor:
        if key in self._labels and not first:
            tensor = tensor.clone()
            tensor[0] = int(self._values.get(key, -100))
        return tensor


def length_of(sample: Any) -> int:
    """Positions of a sample: the first dimension of its first tensor that has one."""
    return _positions(sample)


def _entries(sample: Any) -> dict[Any, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    return dict(enumerate(sample if isinstance(sample, tuple | list) else (sample,)))


def _positions(sample: Any) -> int:
    for value in _entries(sample).values():
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    raise DataError(f"expected a sample with a tensor whose length counts, got {type(sample).__name__}")
