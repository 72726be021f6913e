"""Weights that several stages hold copies of: tied embeddings, tables of position biases.

    virtual stage       0        1        2        3           over two ranks with two chunks each:
    word embeddings     •                 •        •           rank 0 holds two copies, rank 1 one
    encoder's biases    •        •

Copies start equal, get the sum of all copies' gradients, count once in the gradient norm, and are saved once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_dynapipe.runtime.process_groups import group_of_each


class WeightCopies(NamedTuple):
    """One weight as a rank sees it: the virtual stages with a copy, the first one's first, and this rank's copies."""

    stages: Sequence[int]
    copies: Sequence[torch.nn.Parameter]


class _Copies(NamedTuple):
    """A weight's copies on this rank, the group of ranks with others, and where in it the first copy is."""

    copies: list[torch.nn.Parameter]
    group: dist.ProcessGroup | None
    first: int


class SharedWeights:
    """All shared weights of a model, as far as this rank has to do with them. Every rank makes it at the same point.

    Args:
        weights: the weights, in the same order on every rank.
        pipelines: global ranks of every pipeline of the job, by stage.
        backend: the groups' over which gradients are summed; None takes the default group's.
        timeout_s: deadline of every reduction; None takes torch's.
    """

    def __init__(
        self,
        weights: Iterable[WeightCopies],
        pipelines: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        stages = len(pipelines[0])
        stage = next(p.index(dist.get_rank()) for p in pipelines if dist.get_rank() in p)
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._weights: list[_Copies] = []
        self._repeated: set[int] = set()
        for weight in weights:
            holders = tuple(sorted({stage % stages for stage in weight.stages}))
            if holders not in groups:
                lists = [[pipeline[holder] for holder in holders] for pipeline in pipelines]
                groups[holders] = group_of_each(lists, backend=backend, timeout_s=timeout_s)
            copies = list({id(copy): copy for copy in weight.copies}.values())
            if copies:
                first = weight.stages[0] % stages
                self._weights.append(_Copies(copies, groups[holders], holders.index(first)))
                self._repeated |= {id(copy) for copy in (copies if stage != first else copies[1:])}

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The groups over which this rank sums gradients."""
        return [weight.group for weight in self._weights]

    @torch.no_grad()
    def start_equal(self, device: torch.device | None = None) -> None:
        """Give every copy the first one's value, sent from `device` where copies lie elsewhere than groups can send."""
        for weight in self._weights:
            one = weight.copies[0]
            if weight.group is not None:
                value = one.detach().to(device or one.device)
                dist.broadcast(value, group=weight.group, group_src=weight.first)
                one.copy_(value)
            for other in weight.copies[1:]:
                other.copy_(one)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients; frozen weights have none."""
        for weight in self._weights:
            if not weight.copies[0].requires_grad:
                continue
            gradients = [_gradient(copy) for copy in weight.copies]
            total = gradients[0]
            for other in gradients[1:]:
                total += other
            if weight.group is not None:
                dist.all_reduce(total, group=weight.group)
            for other in gradients[1:]:
                other.copy_(total)

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of this rank counts in sums over all weights: every weight does so once."""
        return id(parameter) not in self._repeated


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    """The tensor that gradients are accumulated into: Megatron's `main_grad` where there is one."""
    gradient: torch.Tensor | None = getattr(weight, "main_grad", weight.grad)
    if gradient is None:
        gradient = weight.grad = torch.zeros_like(weight)
    return gradient
