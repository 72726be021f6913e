"""Faults of the planned run of a recipe, planted where it has several ranks, at what the run takes from Megatron."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.bridge.training.gpt_step import forward_step
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.utils import unwrap_model

Change = Callable[[dict[str, Any]], None]


def planted(name: str) -> Any:
    """Plant a fault, by its function below; the step function that has it."""
    fault: Callable[[], Any] = getattr(sys.modules[__name__], name)
    return fault() or forward_step


def is_planned() -> bool:
    return torch.distributed.get_world_size() > 1


def is_last_stage() -> bool:
    return is_planned() and parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def loss_counts_too_much() -> Any:
    """By 1%."""

    def step(state: Any, *arguments: Any, **keywords: Any) -> Any:
        output, loss_of = forward_step(state, *arguments, **keywords)
        excess = 1.01 if is_planned() else 1.0

        def loss(*values: Any, **named: Any) -> Any:
            total, *rest = loss_of(*values, **named)
            return total * excess, *rest

        return output, loss

    return step


def stepping(change: Callable[[Any], bool]) -> None:
    """Have a function see Megatron's optimizer before each of its steps; the step is left out where it says so."""
    step = optimizers.ChainedOptimizer.step_with_ready_grads
    optimizers.ChainedOptimizer.step_with_ready_grads = lambda self: (is_planned() and change(self)) or step(self)


def groups_changed(change: Change) -> None:
    """Change the rates of each group of parameters before each step."""

    def changed(self: Any) -> bool:
        for group in self.param_groups:
            change(group)
        return False

    stepping(changed)


def ten_times_the_decay() -> None:
    groups_changed(lambda group: group.update(weight_decay=10 * group["weight_decay"]))


def no_decay() -> None:
    groups_changed(lambda group: group.update(weight_decay=0.0))


def decay_of_norms_in_place_of_matrices() -> None:
    groups_changed(lambda group: group.update(weight_decay=1 - group["weight_decay"]))


def other_betas() -> None:
    groups_changed(lambda group: group.update(betas=(0.0, 0.5)))


def norms_never_step() -> None:
    groups_changed(lambda group: group.update(lr=group["lr"] if group["weight_decay"] else 0.0))


def half_the_rate_on_one_stage() -> None:
    groups_changed(lambda group: group.update(lr=group["lr"] / (2 if is_last_stage() else 1)))


def last_stage_never_steps() -> None:
    stepping(lambda _: is_last_stage())


def nothing_is_clipped() -> None:
    clip = optimizers.clip_grad_by_total_norm_fp32
    optimizers.clip_grad_by_total_norm_fp32 = lambda *values, **named: is_planned() or clip(*values, **named)


def frozen_weights_decay() -> None:
    def decayed(self: Any) -> bool:
        for optimizer in self.chained_optimizers:
            for model in unwrap_model(optimizer.model_chunks) if is_last_stage() else ():
                for weight in model.parameters():
                    if not weight.requires_grad:
                        weight.data.mul_(1 - 1e-4)
        return False

    stepping(decayed)


def adapted(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Change what each adapter of the last stage adds to its linear."""
    forward = ParallelLinearAdapter.forward

    def changed(self: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        added: torch.Tensor = forward(self, *arguments, **keywords)
        return change(self, added) if is_last_stage() else added

    ParallelLinearAdapter.forward = changed


def adapters_are_not_scaled() -> None:
    adapted(lambda adapter, added: added * (adapter.dim / adapter.alpha))


def adapters_of_every_second_pass_are_left_out() -> None:
    passes = Counter[Any]()

    def left_out(adapter: Any, added: torch.Tensor) -> torch.Tensor:
        passes[adapter] += 1
        return added * (passes[adapter] % 2)

    adapted(left_out)


def adapters_have_another_alpha_backward() -> None:
    """By 1%."""

    def scaled(_: Any, added: torch.Tensor) -> torch.Tensor:
        if added.requires_grad:
            added.register_hook(lambda gradient: 1.01 * gradient)
        return added

    adapted(scaled)


def made(change: Callable[[Any, Any], None]) -> None:
    """Have a function see each linear of the last stage and its adapter when the adapter is made."""
    transform = LoRA.transform

    @functools.wraps(transform)  # Bridge looks at its parameters
    def changed(self: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
        wrapped = transform(self, module, *arguments, **keywords)
        if wrapped is not module and is_last_stage():
            change(module, wrapped.adapter)
        return wrapped

    LoRA.transform = changed


def adapted_weights_train_too() -> None:
    made(lambda linear, _: linear.weight.requires_grad_(True))
