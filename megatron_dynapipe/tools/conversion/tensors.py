"""How one library's tensors become the other's: joined projections, transposed ones, scaled ones.

HuggingFace     q [heads × c, h]   k [groups × c, h]   v [groups × c, h]
Megatron        group 0: q q … k v │ group 1: q q … k v │ …            one tensor, [(heads + 2 groups) × c, h]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter of Megatron's model, and HuggingFace's parameters that hold the same numbers.

    Attributes:
        ours: its name in Megatron's model.
        theirs: names in HuggingFace's.
        join: their tensors, in this order, as ours.
        split: ours as theirs; the inverse of `join`.
        rows: how many rows count, of a tensor that Megatron pads to a round number of rows; 0: all.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = field(default=_first)
    split: Callable[[Tensor], Sequence[Tensor]] = field(default=_alone)
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's heads.

    Attributes:
        heads: heads of queries.
        groups: groups of keys and values.
        scale: factor of queries, where the models scale scores differently.
    """

    heads: int
    groups: int
    scale: float = 1.0

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[(heads + 2 groups) × c, …] of queries, keys and values, group by group."""
        query, key, value = tensors
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in (query * self.scale, key, value)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        by_group = tensor.reshape(self.groups, self.heads // self.groups + 2, -1, *tensor.shape[1:])
        parts = by_group.split([self.heads // self.groups, 1, 1], dim=1)
        query, key, value = (part.flatten(0, 2) for part in parts)
        return [query / self.scale, key, value]

    def join_transposed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join one tensor [h, 3 × heads × c] with queries, keys and values one behind another."""
        return self.join(tensors[0].t().chunk(3))

    def split_transposed(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `join_transposed`."""
        return [torch.cat(self.split(tensor)).t()]

    def join_in_turn(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join one bias [3 × heads × c]."""
        return self.join(tensors[0].chunk(3))

    def split_in_turn(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `join_in_turn`."""
        return [torch.cat(self.split(tensor))]

    def join_pair(self, tensors: Sequence[Tensor]) -> Tensor:
        """[2 × heads × c, h] of cross-attention's keys and values, head by head."""
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split_pair(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `join_pair`."""
        by_group = tensor.reshape(self.groups, 2, -1, *tensor.shape[1:])
        return [by_group[:, 0].flatten(0, 1), by_group[:, 1].flatten(0, 1)]

    def scaled(self, tensors: Sequence[Tensor]) -> Tensor:
        """Queries alone."""
        return tensors[0] * self.scale

    def unscaled(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `scaled`."""
        return [tensor / self.scale]


def transposed(tensors: Sequence[Tensor]) -> Tensor:
    """[out, in] of a tensor [in, out]."""
    return tensors[0].t()


def transposed_back(tensor: Tensor) -> list[Tensor]:
    """The inverse of `transposed`."""
    return [tensor.t()]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Gate and input of a gated layer, one behind the other."""
    return torch.cat(list(tensors))


def unstacked(tensor: Tensor) -> list[Tensor]:
    """The inverse of `stacked`."""
    return list(tensor.chunk(2))
