"""Keys and values of a team: each member's are gathered by all, in the order in which its own chunks attend to them.

    forward    own keys ── all-gather ──► all members' ── picked ──► keys of each segment, its own last
    backward   gathered again; gradients added at the places that were picked, then summed by a reduce-scatter

A place is picked by two segments at most, so that its gradient is a sum of two whatever the order: the same each time.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.runtime.links import sum_own_part

Teams = dict[int, dist.ProcessGroup]
"""This rank's team of each size, by size."""


class TeamKeys:
    """A team's keys and values for one call of attention on one member.

    Args:
        teams: of this rank.
        row: of shares.
        own: this member's, of the same first dimensions, t positions in all.

    Raises:
        ExecutionError: there is no team of the row's size.
    """

    def __init__(self, teams: Teams, row: PackedRow, *own: Tensor) -> None:
        if row.ranks not in teams:
            raise ExecutionError(
                f"a micro-batch is shared by a team of {row.ranks}; this rank is in teams of {sorted(teams) or 'none'}",
                hint="give --dynapipe-context-teams the size of the plan's largest team",
            )
        assert row.key_places is not None, "a row of shares has places"
        self._group = teams[row.ranks]
        self._places = row.key_places
        self.own = [tensor.detach() for tensor in own]
        self._again: list[Tensor] = []
        self.joined: list[Tensor] = list(_Gather.apply(self, *own))

    def gather(self) -> list[Tensor]:
        """What the row's segments attend to: [keys, groups, channels] of each."""
        return [self._gathered(tensor).index_select(0, self._places) for tensor in self.own]

    def _gathered(self, own: Tensor) -> Tensor:
        own = own.flatten(0, -3).contiguous()
        every = own.new_empty(self._group.size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(every, own, group=self._group)
        return every

    def scatter(self, gradient: Tensor, own: Tensor) -> Tensor:
        """The gradient of this member's keys, from all members' gradients of what they attended to."""
        positions = own.shape[:-2].numel()
        every = gradient.new_zeros(self._group.size() * positions, *own.shape[-2:])
        every.index_add_(0, self._places, gradient)
        return sum_own_part(every, self._group).view(own.shape)

    @contextlib.contextmanager
    def gathered_again(self) -> Iterator[None]:
        """What operations save of the joined tensors is not kept, but gathered again in the backward pass, once."""
        numbers = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(self.joined)}

        def pack(tensor: Tensor) -> Any:
            number = numbers.get(tensor.untyped_storage().data_ptr())
            return tensor if number is None else (number, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            number, *form = saved
            if not self._again:  # by all members at their first, whatever each has saved
                self._again = self.gather()
            again: Tensor = self._again[number].as_strided(*form)
            return again

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.joined = []

    def forget(self) -> None:
        """Drop what was gathered again: attention's backward pass is over."""
        self._again = []


class _Gather(torch.autograd.Function):
    """Joins all members' keys and values."""

    @staticmethod
    def forward(ctx: Any, team: TeamKeys, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.team = team
        return tuple(team.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        team = ctx.team
        team.forget()
        return (None, *(team.scatter(gradient, own) for gradient, own in zip(gradients, team.own, strict=True)))
