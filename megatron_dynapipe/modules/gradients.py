"""From the gradients that passes have summed on each rank to the whole batch's gradients, the same on every replica.

sum over replicas ──► sum over copies of shared weights ──► divide by the count ──► norm, overflow, clipping
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.runtime.shared_weights import SharedWeights

_BUCKET_BYTES = 64_000_000


class Gradients:
    """The gradients of a rank's module, on a device. All ranks make it at the same point.

    Replicas start with the first one's weights, and shared weights with their first copy's. The norm is taken over
    `stages`, the ranks of the pipeline. A group is None where this rank is alone.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        *,
        replicas: dist.ProcessGroup | None,
        stages: dist.ProcessGroup | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        self._device = device
        self._parameters = list(module.parameters())
        self._replicas = replicas
        self._stages = stages
        self._shared = shared
        if replicas is not None:
            for tensor in [*self._parameters, *module.buffers()]:
                dist.broadcast(tensor.data, group=replicas, group_src=0)
        if shared is not None:
            shared.start_equal()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
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
        if self._shared is not None:
            self._shared.reduce_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients and divisor != 1:
            torch._foreach_mul_(gradients, 1 / divisor)

    @torch.no_grad()
    def norm(self) -> float:
        """The norm over all stages, every weight counted once; not finite where any gradient is not."""
        counts = (lambda _: True) if self._shared is None else self._shared.counts
        gradients = [p.grad for p in self.parameters if p.grad is not None and counts(p)]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total += torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum()
        if self._stages is not None:
            dist.all_reduce(total, group=self._stages)
        return float(total.sqrt())

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale all gradients, whose norm is `norm`, so that it is at most `max_norm`."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, torch.tensor(norm, device=self._device))

    def _sum_over_replicas(self, group: dist.ProcessGroup) -> None:
        """A weight that got a gradient on any replica has one on all; one that got none anywhere keeps none."""
        parameters = self.parameters
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
        gradients = []
        for parameter, any_has in zip(parameters, has.tolist(), strict=True):
            if any_has:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=group)
            sums = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [total.view_as(g) for total, g in zip(sums, bucket, strict=True)])


class LossScale:
    """A `GradScaler` as the state of a loss scale on all ranks: each tells its own of an overflow on any.

    The scaler sees one gradient that stands for all.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._stand_in = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = torch.optim.SGD([self._stand_in], lr=0.0)

    @property
    def value(self) -> float:
        """Factor of the loss, now."""
        return float(self._scaler.get_scale())

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        self._scaler.scale(self._stand_in)  # makes its state
        self._stand_in.grad = torch.full((1,), float("inf") if overflow else 0.0)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def state(self) -> dict[str, float]:
        """The state that a checkpoint keeps."""
        state = self._scaler.state_dict()
        return {"loss_scale": state["scale"], "good_steps": state["_growth_tracker"]} if state else {}

    def load(self, saved: Mapping[str, float]) -> None:
        """Take the state of a checkpoint."""
        if state := self._scaler.state_dict():
            state |= {"scale": saved["loss_scale"], "_growth_tracker": int(saved["good_steps"])}
            self._scaler.load_state_dict(state)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_buckets.get(gradient.dtype, ([], 0))
        if not bucket or size + gradient.nbytes > _BUCKET_BYTES:
            bucket = []
            size = 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_buckets[gradient.dtype] = bucket, size + gradient.nbytes
    return buckets
