"""Values for a part of a model that was built without memory: from a state dict, or from the modules themselves."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from megatron_dynapipe.errors import ConfigError

Initialise = Callable[[nn.Module], None]
"""Gives the parameters that a module holds itself their first values."""


@torch.no_grad()
def materialise(
    part: nn.Module,
    names: Mapping[str, str],
    state_dict: Mapping[str, torch.Tensor] | None,
    initialise: Initialise,
    device: torch.device | None,
    *,
    later: Collection[str] = (),
) -> None:
    """Give a part memory and values, module by module, so that it never takes more than itself and one module.

    Args:
        part: this rank's; what it holds in memory already stays, unless `state_dict` says otherwise.
        names: of every parameter, the first name of those that share it: another one's value will do.
        state_dict: values by name; only this part's are read.
        initialise: for modules without values in a state dict.
        device: where the part goes; by default meta tensors go to the host and others stay.
        later: weights that another stage's copies give their values when training begins.

    Raises:
        ConfigError: a parameter or buffer has no value, or one of another shape.
    """
    made: dict[int, torch.Tensor] = {}
    for prefix, module in part.named_modules():
        empty = False
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                derived = name in module._non_persistent_buffers_set  # not in a state dict by its nature
                value = None if derived else _value(full, tensor, names, state_dict)
                needed = tensor.is_meta and value is None and full not in later
                empty = empty or (needed and id(tensor) not in made)
                if id(tensor) not in made:
                    made[id(tensor)] = _filled(tensor, value, device)
                    if tensor.is_meta and value is None and full in later:
                        made[id(tensor)].zero_()  # not what the memory held before
                kind[name] = made[id(tensor)]
        if empty:
            initialise(module)


def _value(
    name: str, tensor: torch.Tensor, names: Mapping[str, str], state_dict: Mapping[str, torch.Tensor] | None
) -> torch.Tensor | None:
    if state_dict is None:
        return None
    same = [other for other, first in names.items() if first == names.get(name)]
    found = next((each for each in (name, *same) if each in state_dict), None)
    if found is None:
        if tensor.is_meta:
            raise ConfigError(
                f"expected a value of {name} in the state dict, got none",
                hint="give a whole state dict, or build the model with memory",
            )
        return None
    value = state_dict[found]
    if value.shape != tensor.shape:
        raise ConfigError(
            f"expected a value of {name} of shape {tuple(tensor.shape)} in the state dict, got {tuple(value.shape)}"
        )
    return value


def _filled(tensor: torch.Tensor, value: torch.Tensor | None, device: torch.device | None) -> torch.Tensor:
    """The tensor with memory and, if there is one, the value; the same object where that is possible."""
    target = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    if tensor.is_meta or tensor.device != target:
        data = torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.data.to(target)
        if isinstance(tensor, nn.Parameter):
            filled: torch.Tensor = nn.Parameter(data, requires_grad=tensor.requires_grad)
        else:
            filled = data
    else:
        filled = tensor
    if value is not None:
        filled.copy_(value)
    return filled


def initialise_with(model: nn.Module) -> Initialise:
    """How modules fill themselves: by their own `reset_parameters`, else by the model's `_init_weights`, which models
    of `transformers` have.
    """

    def initialise(module: nn.Module) -> None:
        fill = getattr(module, "reset_parameters", None)
        if fill is not None:
            fill()
        elif (of_model := getattr(model, "_init_weights", None)) is not None:
            of_model(module)
        else:
            raise ConfigError(
                f"a {type(module).__name__} was built without memory and cannot fill itself",
                hint="give split_model a state_dict, or initialise=, a function that fills one module",
            )

    return initialise
