"""A batch by the names of the model's arguments: what goes into the model, and what only the loss reads."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_dynapipe.core.errors import ConfigError, DataError

Batch = Mapping[str, Any]
"""Tensors (and constants) by the name of the model's argument."""

LABELS = ("labels", "label", "targets", "target")
"""Keys that a batch may hold for the loss alone, if the model has no such argument."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The entries of a batch that are the model's.

    Attributes:
        names: the model's, in the order of its arguments where batches are tuples.
        labels: further keys that a batch may have.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, example: Any, labels: Sequence[str] = LABELS) -> Self:
        """Make it from an example of a batch: a dict, a tuple or one tensor.

        Raises:
            ConfigError: the example has a key that the model does not know, or lacks an argument.
        """
        arguments = inspect.signature(model.forward).parameters
        named = [name for name, argument in arguments.items() if argument.kind in _NAMED]
        anything = not named and any(a.kind is inspect.Parameter.VAR_KEYWORD for a in arguments.values())
        if not isinstance(example, Mapping):
            names = tuple(named[: len(_as_tuple(example))])
        else:
            names = tuple(key for key in example if key in named or (anything and key not in labels))
            if unknown := [key for key in example if key not in names and key not in labels]:
                raise ConfigError(
                    f"the batch has the key {unknown[0]!r}, which is none of the model's arguments {', '.join(named)}",
                    hint=f"remove it, or name it among labels=({unknown[0]!r},) if only the loss reads it",
                )
        required = [name for name in named if arguments[name].default is inspect.Parameter.empty]
        if missing := [name for name in required if name not in names]:
            raise ConfigError(f"expected the batch to hold the model's argument {missing[0]!r}, got {', '.join(names)}")
        return cls(names=names, labels=tuple(labels))

    def name(self, batch: Any) -> dict[str, Any]:
        """A batch by names.

        Raises:
            DataError: a key is missing, or is neither the model's nor the loss's.
        """
        if not isinstance(batch, Mapping):
            values = _as_tuple(batch)
            names = [*self.names, *self.labels]
            if not len(self.names) <= len(values) <= len(names):
                raise DataError(
                    f"expected a batch of {len(self.names)} values for {', '.join(self.names)}, and labels after them, "
                    f"got {len(values)}"
                )
            return dict(zip(names, values, strict=False))
        if missing := [name for name in self.names if name not in batch]:
            raise DataError(f"expected the batch to hold {', '.join(self.names)}, but {missing[0]} is missing")
        if unknown := [key for key in batch if key not in self.names and key not in self.labels]:
            raise DataError(
                f"the batch has the key {unknown[0]!r}, which the model does not know: it "
                f"takes {', '.join(self.names)}",
                hint="give split_model an example batch with it, or name it among its labels",
            )
        return dict(batch)

    def of_model(self, batch: Batch) -> dict[str, Any]:
        """The entries that go into the model."""
        return {name: batch[name] for name in self.names}


def split_batch(batch: Batch, parts: int) -> list[dict[str, Any]]:
    """Divide a batch along its first dimension into parts of as equal sizes as can be; none of them is empty.

    Tensors whose first dimension is another than the batch's, and values of other kinds, go whole to every part.

    Raises:
        DataError: there are no samples, or tensors inside a list or dict, which would not be divided.
    """
    rows = batch_rows(batch)
    parts = min(parts, rows)
    sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
    parts_of = {key: torch.split(value, sizes) for key, value in batch.items() if has_rows(value, rows)}
    return [
        {key: parts_of[key][part] if key in parts_of else value for key, value in batch.items()}
        for part in range(parts)
    ]


def has_rows(value: Any, rows: int) -> bool:
    """Whether an entry of a batch has a row for each sample."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def batch_rows(batch: Batch) -> int:
    """Samples of a batch: the first dimension of its first tensor; raises as `split_batch`."""
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) and any(isinstance(e, torch.Tensor) for e in tree_leaves(value)):
            raise DataError(
                f"expected tensors by the names of the model's arguments, got a {type(value).__name__} of tensors as "
                f"{key!r}, which would go whole to every micro-batch",
                hint="give each tensor a name of its own, or give run micro-batches",
            )
    rows = next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
    if not rows:
        raise DataError(
            f"expected a batch of at least one sample, got none in {', '.join(map(str, batch)) or 'an empty batch'}",
            hint="a replica without samples calls run([])",
        )
    return rows


def _as_tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
