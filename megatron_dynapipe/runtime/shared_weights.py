"""One rank's copies of a weight that several stages hold: they start equal and share the sum of their gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class SharedCopies:
    """The copies of one weight on this rank, and the group of the ranks that hold others.

    Args:
        copies: this rank's, at least one.
        group: of the ranks with a copy, or None where there is no other.
        first: index in the group of the rank whose first copy gives all their value.
    """

    def __init__(self, copies: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None, *, first: int) -> None:
        self._copies = copies
        self._group = group
        self._first = first

    @torch.no_grad()
    def start_equal(self, device: torch.device | None = None) -> None:
        """Give every copy the first one's value, sent from `device` where copies lie elsewhere than groups can send."""
        one = self._copies[0]
        if self._group is not None:
            value = one.detach().to(device or one.device)
            dist.broadcast(value, group=self._group, group_src=self._first)
            one.copy_(value)
        for other in self._copies[1:]:
            other.copy_(one)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        gradients = [_gradient(copy) for copy in self._copies]
        total = gradients[0]
        for other in gradients[1:]:
            total += other
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        for other in gradients[1:]:
            other.copy_(total)


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    """What gradients are accumulated into: Megatron's `main_grad` where there is one."""
    gradient: torch.Tensor | None = getattr(weight, "main_grad", weight.grad)
    if gradient is None:
        gradient = weight.grad = torch.zeros_like(weight)
    return gradient
