"""What a stage must know of a micro-batch before it runs: what crosses its boundaries, and how to run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.inputs import Batch, Inputs
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.plan.instructions import TensorShape


@dataclass(frozen=True)
class Boundary:
    """The tensors that cross from one virtual stage to the next, in the order in which they are sent.

    Gradients cross back for those that are differentiable.
    """

    shapes: tuple[TensorShape, ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]

    @cached_property
    def gradient_shapes(self) -> tuple[TensorShape, ...]:
        """Shapes of what crosses back."""
        return tuple(shape for shape, wants in zip(self.shapes, self.differentiable, strict=True) if wants)

    @cached_property
    def gradient_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of what crosses back."""
        return tuple(dtype for dtype, wants in zip(self.dtypes, self.differentiable, strict=True) if wants)


Run = Callable[[Sequence[torch.Tensor], Batch, torch.device], Any]
"""One virtual stage: from what it received and the batch to what it sends; on the last one, to the model's output."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How micro-batches of one shape run on this rank.

    Attributes:
        boundaries: by the virtual stage before the boundary; those of this rank's stages.
        runs: by virtual stage of this rank.
        keys: of the batch, that each virtual stage of this rank reads.
    """

    boundaries: Mapping[int, Boundary]
    runs: Mapping[int, Run]
    keys: Mapping[int, Sequence[str]]


class Part(nn.Module):
    """The share of a model that one rank holds: its virtual stages, and where it stands.

    Parameters, buffers and their names are those of the whole model. `split_model` makes one; `Stage` wraps a module
    of the user's.

    Attributes:
        ranks: this rank's place.
        chunks: virtual stages of this rank.
        inputs: which of a batch's entries are the model's.
    """

    ranks: Ranks
    chunks: int
    inputs: Inputs

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.ranks.stage

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return self.ranks.stages

    @property
    def replica(self) -> int:
        """The replica that this rank is in."""
        return self.ranks.replica

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.ranks.stages * self.chunks - 1

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the host for a part without any."""
        tensor = next(itertools.chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def holders(self) -> dict[str, list[tuple[int, str]]]:
        """Weights that several virtual stages hold: under the first one's name, each stage and its name there."""
        raise NotImplementedError

    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        """Whether `layouts` has nothing to find out about micro-batches; the same on all ranks of a pipeline."""
        raise NotImplementedError

    def find_out(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> None:
        """Learn what some rank does not know of micro-batches; every rank of the job calls it."""
        self.layouts(batches, autocast)

    def saved_names(self) -> dict[str, str]:
        """By its name on this rank, the name under which a weight is saved; the others are saved under their own."""
        return {name: first for first, places in self.holders().items() for _, name in places}

    def use_shapes(self, shapes: Any) -> None:
        """Take the shapes at boundaries as given; see `Pipeline`."""
        raise ConfigError(
            "expected no tensor_shapes for a part that split_model made: it knows its shapes",
            hint="leave tensor_shapes out",
        )

    def layouts(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Layout]:
        """How each micro-batch runs. All ranks of a pipeline call it with batches of equal shapes."""
        raise NotImplementedError


def signature(batch: Batch) -> tuple[Any, ...]:
    """What a micro-batch's layout depends on: shapes and dtypes of its tensors, and its other values."""
    return tuple(
        (key, tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else (key, repr(value))
        for key, value in batch.items()
    )
