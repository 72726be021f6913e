"""Repairs of Megatron while DynaPipe trains: its optimizers, reductions over gloo, kernels that are not installed.

Without the optimizers' repairs a run could not be resumed, or would resume with another optimizer than it saved. The
table has all of these; each row goes when upstream's own code passes `tests/megatron/entry/test_checkpoints.py` without
it. `gloo_reductions` and `fused_kernels` have the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynapipe.megatron.hooks import fused_kernels, gloo_reductions
from megatron_dynapipe.megatron.hooks.originals import Originals, Replacement


def with_padding(sharded_state: Callable[..., object]) -> Callable[..., object]:
    """`sharded_param_state_fully_reshardable` that finds every parameter's state.

    The original gathers the state without the padding after each bucket, then looks for parameters at their places with
    it: behind the first padded bucket it saves the state of others, or zeros.
    """

    @functools.wraps(sharded_state)
    def padded(self: Any, *arguments: object, **keywords: object) -> Any:
        gathered = [(buffer, buffer.numel) for buffer in self.buffers]
        gathered += [(bucket, bucket.grad_data.numel()) for buffer in self.buffers for bucket in buffer.buckets]
        unpadded = [owner.numel_unpadded for owner, _ in gathered]
        for owner, elements in gathered:
            owner.numel_unpadded = elements
        try:
            return sharded_state(self, *arguments, **keywords)
        finally:
            for (owner, _), elements in zip(gathered, unpadded, strict=True):
                owner.numel_unpadded = elements

    return padded


def with_optimizer_state(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """`state_dict` that makes Adam's state, before any step, if there is none yet.

    Loading asks for the state's form before the first step.
    """

    @functools.wraps(state_dict)
    def with_state(self: Any) -> dict[str, Any]:
        for group in self.optimizer.param_groups if _is_pytorchs_adam(self) else ():
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    moments = {key: torch.zeros_like(parameter) for key in self.optimizer_state_keys}
                    step = torch.zeros((), device=parameter.device if group["fused"] else None)
                    self.optimizer.state[parameter] = {"step": step, **moments}
        return state_dict(self)

    return with_state


def with_steps_apart(load_state_dict: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`load_state_dict` that gives every parameter a count of steps of its own.

    The original gives all of them one tensor, which then counts a step for every parameter.
    """

    @functools.wraps(load_state_dict)
    def load(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values() if _is_pytorchs_adam(self) else ():
            parameter_state["step"] = parameter_state["step"].clone()
        if self.optimizer.defaults.get("fused"):  # a checkpoint may be of a run without
            fused_kernels.fuse_adam(self)

    return load


def with_step_of_any_adam(load_state_dict: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`load_state_dict` that finds the count of steps where the saving run's Adam kept it.

    PyTorch's counts for each parameter, Transformer Engine's and apex's for each group: a run that begins or ceases to
    have these would go on as from its first step.
    """

    @functools.wraps(load_state_dict)
    def load(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for group in self.optimizer.param_groups:
            states = [(p, self.optimizer.state[p]) for p in group["params"] if self.optimizer.state.get(p)]
            if not _is_pytorchs_adam(self):
                for step in [of_parameter.pop("step") for _, of_parameter in states if "step" in of_parameter]:
                    group.setdefault("step", int(step))
            elif "step" in group:
                step = float(group.pop("step"))
                for parameter, of_parameter in states:
                    device = parameter.device if group.get("fused") else None
                    of_parameter.setdefault("step", torch.tensor(step, device=device))

    return load


def without_step(set_states: Callable[[Any, Any, dict[str, Any]], None]) -> Callable[[Any, Any, dict[str, Any]], None]:
    """`_set_main_param_and_optimizer_states` that leaves the count of steps as it was loaded.

    One checkpoint format has no step here (KeyError), the other the template's, which is 0. The parameter it copies
    into is a leaf that requires gradients.
    """

    @functools.wraps(set_states)
    def set_without_step(self: Any, model_parameter: Any, tensors: dict[str, Any]) -> None:
        if not _is_pytorchs_adam(self):
            return set_states(self, model_parameter, tensors)
        with torch.no_grad():
            return set_states(self, model_parameter, {**tensors, "step": None})  # what is no tensor is passed over

    return set_without_step


def _is_pytorchs_adam(optimizer: Any) -> bool:
    """Whether an optimizer wraps the Adam that Megatron takes without fused ones.

    Transformer Engine's and apex's keep one count of steps elsewhere, as Megatron's code expects.
    """
    return isinstance(optimizer.optimizer, torch.optim.Adam)


MODULE = "megatron.core.optimizer.distrib_optimizer"
CLASS = "DistributedOptimizer"
PATCHES: tuple[Replacement, ...] = (
    Replacement(
        owner=f"{MODULE}.{CLASS}",
        name="sharded_param_state_fully_reshardable",
        make=with_padding,
        parameters=("self", "model_sharded_state_dict", "is_loading", "metadata"),
        why="saves zeros or another parameter's state behind a bucket that was padded (its own warning: a bug in the"
        " parameter ranges)",
    ),
    Replacement(
        owner=f"{MODULE}.{CLASS}",
        name="state_dict",
        make=with_optimizer_state,
        parameters=("self",),
        why="asserts on the empty state of PyTorch's Adam about to load",
    ),
    Replacement(
        owner=f"{MODULE}.{CLASS}",
        name="load_state_dict",
        make=with_steps_apart,
        parameters=("self", "state_dict"),
        why="shares one count of steps of PyTorch's Adam among all parameters",
    ),
    Replacement(
        owner=f"{MODULE}.{CLASS}",
        name="_set_main_param_and_optimizer_states",
        make=without_step,
        parameters=("self", "model_param", "tensors"),
        why="loses the count of steps of PyTorch's Adam, and copies into a leaf that requires gradients",
    ),
    *(
        Replacement(
            owner=f"megatron.core.optimizer.optimizer.{name}",
            name="load_state_dict",
            make=with_step_of_any_adam,
            parameters=("self", "state_dict"),
            why="leaves the count of steps of a checkpoint where another Adam had it",
        )
        for name in ("FP32Optimizer", "Float16OptimizerWithFloat16Params")
    ),
)
"""Everything that is patched in optimizers."""

_originals = Originals()


def apply() -> None:
    """Install all repairs; a second call changes nothing."""
    if _originals:
        return
    _originals.install(PATCHES)
    gloo_reductions.install(_originals)
    fused_kernels.install(_originals)


def revert() -> None:
    """Restore Megatron's own methods; does nothing if none is patched."""
    _originals.revert()
