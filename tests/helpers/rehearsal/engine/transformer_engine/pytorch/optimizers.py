"""The fused optimizer, and functions of lists of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    """Adam whose groups, not parameters, count steps; a group's step is an int."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable, "is not rehearsed"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        (first, second), gradient = group["betas"], parameter.grad.float()
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        scale = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        change = (mean / (1 - first ** group["step"])).div_(scale).add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(change, alpha=group["lr"])


def multi_tensor_applier(
    operation: Callable[..., Any], overflow: Tensor, lists: list[list[Tensor]], *arguments: Any
) -> Any:
    """An operation over lists of tensors, of which those without elements are left out."""
    kept = [tensor.numel() > 0 for tensor in lists[0]]
    lists = [[tensor for tensor, keep in zip(tensors, kept, strict=True) if keep] for tensors in lists]
    return operation(2048 * 32, overflow, lists, *arguments) if lists[0] else None


def multi_tensor_l2norm(
    _: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The norm of all tensors together, [1], and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm()[None], norms if per_tensor else None


def multi_tensor_scale(_: int, overflow: Tensor, lists: list[list[Tensor]], scale: float | Tensor) -> None:
    """Write the scaled tensors of one list to the other; mark what overflows."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        overflow.copy_(overflow | ~target.isfinite().all())


multi_tensor_scale_tensor = multi_tensor_scale
