"""A rank's parameters, gradients and optimizer by their names and places in the whole model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import get_model_config, unwrap_model
from torch import nn

from megatron_dynapipe.tools.certify.records import MOMENTS, UPDATES, Part


def entries(model: nn.Module) -> list[ShardedTensor]:
    """A chunk's trained parameters with names and places as Megatron's checkpoints have them; data are views of theirs.

    Copies of a tied weight share name and place.
    """
    # Checkpoints know nothing of what wraps a layer for its adapters.
    names = {name.replace(".to_wrap.", "."): value.requires_grad for name, value in model.named_parameters()}
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    assert names.keys() <= sharded.keys(), "every parameter is in checkpoints"
    kept = {name: sharded[name] for name, is_trained in names.items() if is_trained}
    apply_factories(kept)
    return list(_leaves(kept))


def _leaves(node: object) -> Iterator[ShardedTensor]:
    if isinstance(node, ShardedTensor):
        yield node
    elif isinstance(node, dict):
        for inner in node.values():
            yield from _leaves(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _leaves(inner)


def parts_of(models: Sequence[nn.Module], values: Callable[[nn.Parameter], torch.Tensor]) -> list[Part]:
    """Copies of a value of a parameter's shape, such as its gradient, for all trained ones of this rank's chunks."""
    parts: list[Part] = []
    for model in models:
        # What a checkpoint would save in their place, in parameters of their own: one whose data has had another type
        # has lost its gradient's hooks.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        others = {parameter: _like(parameter, values(parameter)) for parameter in trained}
        kept = [(module, dict(module._parameters)) for module in model.modules()]
        try:
            for module, parameters in kept:
                for name, parameter in parameters.items():
                    if parameter in others:
                        module._parameters[name] = others[parameter]
            for entry in entries(model):
                copied = entry.data.detach().clone(memory_format=torch.contiguous_format).cpu()
                parts.append((entry.key, list(entry.global_offset), list(entry.global_shape), copied))
        finally:
            for module, parameters in kept:
                module._parameters.update(parameters)
    return parts


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    other = nn.Parameter(value)
    other.__dict__.update(parameter.__dict__)
    return other


def gradients_of(models: Sequence[nn.Module]) -> list[Part]:
    """Gradients of this rank, which Megatron's wrapper has added up and finished, without the loss scale."""
    scale_loss = get_model_config(models[0]).grad_scale_func
    scale = 1.0
    if scale_loss is not None:
        device = next(models[0].parameters()).device
        scale = float(scale_loss(torch.ones(1, device=device)))

    def gradient(parameter: nn.Parameter) -> torch.Tensor:
        return parameter.main_grad.float() / scale  # type: ignore[attr-defined, no-any-return]

    return parts_of(unwrap_model(list(models)), gradient)


def weights_of(models: Sequence[nn.Module]) -> list[Part]:
    """Copies of this rank's weights."""
    return parts_of(unwrap_model(list(models)), lambda parameter: parameter.data)


def frozen_of(models: Sequence[nn.Module]) -> dict[str, int]:
    """A digest of each frozen weight of this rank, which no step may change."""
    return {
        f"{chunk}.{name}": int(weight.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for chunk, model in enumerate(unwrap_model(list(models)))
        for name, weight in model.named_parameters()
        if not weight.requires_grad
    }


def steps_of(models: Sequence[nn.Module], optimizer: object, before: Sequence[Part]) -> dict[str, list[Part]]:
    """What steps have made of this rank's parameters: how far each has moved, and the optimizer's means of gradients.

    Args:
        models: this rank's chunks.
        optimizer: Megatron's; one that divides its state among replicas gathers it, so all of them have to call this.
        before: the weights before the first step, from `weights_of`.
    """
    moved: list[Part] = []
    for new, old in zip(weights_of(models), before, strict=True):
        *place, weight = new
        moved.append((*place, weight - old[3]))  # type: ignore[arg-type]
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    made = {UPDATES: moved}
    for key, name in MOMENTS.get(optimizers[0].config.optimizer, {}).items():
        made[name] = parts_of(unwrap_model(list(models)), partial(_moment, optimizers, key))
    return made


def _moment(optimizers: Sequence[Any], key: str, parameter: nn.Parameter) -> torch.Tensor:
    """A part of the optimizer's state of a parameter, in the parameter's shape; zeros before a step was made."""
    for optimizer in optimizers:
        if any(parameter in buffer.param_index_map for buffer in getattr(optimizer, "buffers", ())):
            # Divided among replicas; some may have nothing of it.
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if parameter in optimizer.model_param_group_index_map:
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                if key in state:  # of a rank that has made a step
                    whole[owned.start : owned.end] = state[key].flatten()
            dist.all_reduce(whole, group=optimizer.data_parallel_group)
            return whole.view_as(parameter)
        if optimizer.optimizer and (state := optimizer.optimizer.state.get(parameter)):
            moment: torch.Tensor | None = state.get(key)  # PyTorch's SGD without momentum has None
            return torch.zeros_like(parameter) if moment is None else moment
    return torch.zeros_like(parameter)
