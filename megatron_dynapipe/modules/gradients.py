"""From the gradients that passes have summed on each rank to those of the whole batch, the same on every replica.

sum over replicas ──► sum over copies of shared weights ──► divide by the count ──► norm, overflow, clipping
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.modules.shared import SharedWeights
from megatron_dynapipe.runtime.process_groups import backend_of

_BUCKET_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Norm:
    """Of all gradients of the job; not finite where any of them is not."""

    value: float

    @property
    def is_finite(self) -> bool:
        """Whether every gradient is a number."""
        return self.value == self.value and self.value != float("inf")


class Gradients:
    """The gradients of a rank's part. Every rank makes it at the same point: it makes process groups.

    Replicas start with the first one's weights, and shared weights with their first copy's.
    """

    def __init__(self, part: Part) -> None:
        backend = backend_of(part.device)
        self._part, self._parameters = part, list(part.parameters())
        self._replicas = part.ranks.groups_over_replicas(backend)
        self._stages = part.ranks.groups_over_stages(range(part.stages), backend)
        self.shared = SharedWeights(part, backend)
        self._start_equal()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained, each once."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def reduce(self, divisor: float) -> None:
        """Sum over replicas and copies, then divide."""
        if self._replicas is not None:
            self._sum_over_replicas(self._replicas)
        self.shared.reduce_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and divisor != 1:
            torch._foreach_mul_(gradients, 1 / divisor)

    @torch.no_grad()
    def norm(self) -> Norm:
        """The norm over all stages, every weight counted once."""
        mine = [p.grad for p in self.parameters if p.grad is not None and self.shared.counts(p)]
        total = torch.zeros((), dtype=torch.float64, device=self._part.device)
        if mine:
            total += torch.stack([norm.double() for norm in torch._foreach_norm(mine)]).square().sum()
        if self._stages is not None:
            dist.all_reduce(total, group=self._stages)
        return Norm(float(total.sqrt()))

    @torch.no_grad()
    def clip(self, norm: Norm, max_norm: float) -> None:
        """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
        factor = max_norm / (norm.value + 1e-6)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and factor < 1:
            torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def _start_equal(self) -> None:
        if self._replicas is not None:
            for tensor in [*self._part.parameters(), *self._part.buffers()]:
                dist.broadcast(tensor.data, group=self._replicas, group_src=0)
        self.shared.start_equal()

    def _sum_over_replicas(self, group: dist.ProcessGroup) -> None:
        """A weight that got a gradient on any replica has one on all; one that got none anywhere keeps none."""
        parameters = self.parameters
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._part.device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
        wanted = [parameter for parameter, any_has in zip(parameters, has.tolist(), strict=True) if any_has]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in wanted if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(
                list(bucket),
                [piece.view_as(g) for piece, g in zip(flat.split([g.numel() for g in bucket]), bucket, strict=True)],
            )


def _buckets(gradients: Iterable[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Gradients of one dtype that are reduced together."""
    buckets: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_buckets.get(gradient.dtype, ([], 0))
        if not bucket or size + gradient.nbytes > _BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_buckets[gradient.dtype] = bucket, size + gradient.nbytes
    return list(buckets)
