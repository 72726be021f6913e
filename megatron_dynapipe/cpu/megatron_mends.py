"""What is mended or silenced inside Megatron itself: the one module of this package that imports it.

`platform.enable` imports it after the stand-ins are in force.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets import utils as _datasets_utils

from megatron_dynapipe.cpu import fakes
from megatron_dynapipe.cpu.standins import StandIn
from megatron_dynapipe.errors import UnsupportedMegatronError


def compile_helpers() -> None:
    """Check that the helpers of Megatron's datasets are there; the wheel ships them compiled.

    Raises:
        UnsupportedMegatronError: they are not.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise UnsupportedMegatronError(
            "expected megatron-core with its compiled dataset helpers, found one without",
            hint="install megatron-core from its wheel",
        )


def with_optimizer_state(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """`DistributedOptimizer.state_dict` that makes Adam's state, as of no step, where there is none yet.

    Loading asks for the state's form before the first step; fused optimizers keep their step elsewhere.
    """

    @functools.wraps(state_dict)
    def with_state(self: Any) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    moments = {key: torch.zeros_like(parameter) for key in self.optimizer_state_keys}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return state_dict(self)

    return with_state


def with_steps_apart(load_state_dict: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`DistributedOptimizer.load_state_dict` that gives every parameter a count of steps of its own.

    The original gives all of them one tensor, which then counts a step for every parameter.
    """

    @functools.wraps(load_state_dict)
    def load(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for parameter_state in self.optimizer.state.values():
            parameter_state["step"] = parameter_state["step"].clone()

    return load


def without_step(set_states: Callable[[Any, Any, dict[str, Any]], None]) -> Callable[[Any, Any, dict[str, Any]], None]:
    """`DistributedOptimizer._set_main_param_and_optimizer_states` that leaves the count of steps as it was loaded.

    One checkpoint format has no step here (KeyError), the other the template's, which is 0. The parameter it copies
    into is a leaf that requires gradients.
    """

    @functools.wraps(set_states)
    def set_without_step(self: Any, model_parameter: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            set_states(self, model_parameter, {**tensors, "step": None})  # what is no tensor is passed over

    return set_without_step


def with_padding(sharded_state: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedOptimizer.sharded_param_state_fully_reshardable` that finds every parameter's state.

    The original gathers the state without the padding after each bucket, then looks for parameters at their places with
    it: behind the first padded bucket it saves the state of others, or zeros.
    """

    @functools.wraps(sharded_state)
    def padded(self: Any, *arguments: Any, **keywords: Any) -> Any:
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


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_UNTIL = "; until Megatron's distributed optimizer resumes with PyTorch's own Adam"

MENDS: tuple[StandIn, ...] = (
    StandIn(
        owner=_datasets_utils.__name__,
        name="compile_helpers",
        make=lambda original: compile_helpers,
        why="runs make in the package's folder, where the wheel has no Makefile, and exits when that fails",
    ),
    StandIn(
        owner=_DISTRIBUTED_OPTIMIZER,
        name="state_dict",
        make=with_optimizer_state,
        why="asserts on the empty state of an optimizer that is about to load" + _UNTIL,
    ),
    StandIn(
        owner=_DISTRIBUTED_OPTIMIZER,
        name="load_state_dict",
        make=with_steps_apart,
        why="shares one count of steps among all parameters" + _UNTIL,
    ),
    StandIn(
        owner=_DISTRIBUTED_OPTIMIZER,
        name="_set_main_param_and_optimizer_states",
        make=without_step,
        why="loses the count of steps, and copies into a leaf that requires gradients" + _UNTIL,
    ),
    StandIn(
        owner=_DISTRIBUTED_OPTIMIZER,
        name="sharded_param_state_fully_reshardable",
        make=with_padding,
        why="saves zeros or another parameter's state behind a bucket that was padded (its own warning: a bug in the"
        " parameter ranges); until that is mended upstream, on GPUs as well",
    ),
)
"""Replacements in Megatron's own modules, in the form of the table of stand-ins."""

SILENCED: tuple[StandIn, ...] = (
    StandIn(
        owner="megatron.training.arguments",
        name="_print_args",
        make=fakes.always(fakes.nothing),
        why="prints some eight hundred lines, most of them of features that are off",
    ),
    StandIn(
        owner="megatron.training.training",
        name="report_theoretical_memory",
        make=fakes.always(fakes.nothing),
        why="prints ten lines that know nothing of plans",
    ),
)
"""Functions that print at start-up what nobody reads."""

SILENCED_ON_CPU: tuple[StandIn, ...] = (
    StandIn(
        owner="megatron.training.training",
        name="report_memory",
        make=fakes.always(fakes.nothing),
        why="prints, on every rank, counters that are zero without CUDA",
    ),
)
"""Functions that print what means nothing on a CPU."""


def silence_prints(*, memory: bool) -> None:
    """Make the functions of `SILENCED` (and, if `memory`, of `SILENCED_ON_CPU`) print nothing."""
    for stand_in in SILENCED + (SILENCED_ON_CPU if memory else ()):
        module = importlib.import_module(stand_in.owner)
        setattr(module, stand_in.name, stand_in.make(getattr(module, stand_in.name)))
