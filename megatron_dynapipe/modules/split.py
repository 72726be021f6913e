"""`split_model`: from a whole model to this rank's part.

model ──(trace)──► nodes between cuts ──(choose cuts)──► stages ──(share modules, materialise)──► this rank's part
"""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megatron_dynapipe.choosing.evenest import evenest
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.modules.inputs import LABELS, Batch, Inputs
from megatron_dynapipe.modules.part import ModelPart, parameter_names, segment_parameters
from megatron_dynapipe.modules.program import SplitTrace
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.trace import TracedForward, cut_points, resolve_split_points, trace
from megatron_dynapipe.segments import SegmentCosts, divide_segments, stage_of_each

Initialise = Callable[[nn.Module], None]
"""Gives the parameters that a module holds itself their first values."""


def split_model(
    model: nn.Module,
    example_batch: object,
    *,
    split_points: Sequence[str] | None = None,
    stages: int | None = None,
    costs: SegmentCosts | str | Path | None = None,
    memory_limit_bytes: int | None = None,
    shared_weights: Sequence[tuple[str, str]] = (),
    replicas: int = 1,
    labels: Sequence[str] = LABELS,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    initialise: Initialise | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
) -> ModelPart:
    """Divide a model over the ranks of the process group, and keep this rank's part. Every rank calls it alike.

    The part shares its modules with the model, which may be dropped afterwards. Rank is `stage × replicas + replica`.

    Args:
        model: the whole model, or one built under `torch.device("meta")`, which costs no memory.
        example_batch: a forward's arguments: a dict by name, a tuple or a tensor; sizes may differ later, keys may not.
        split_points: names of the modules at which stages begin: "transformer.h.3", or "h.3" where only one module's
            name ends so. By default those marked by `CutPoint` inside the model.
        stages: virtual stages, where there are more places to divide at than are needed; they are evened out by
            `costs`, else by numbers of parameters. By default one per rank of a pipeline, or one more than there are
            split points. A multiple of the ranks gives every rank as many virtual stages.
        costs: the costs of the segments between cuts, from `profile_module`, or the path of its file.
        memory_limit_bytes: memory of one device, if costs are given.
        shared_weights: pairs of names of parameters that are to be one weight, if the model does not share them itself.
        replicas: data-parallel replicas of the pipeline.
        labels: keys of a batch that only the loss reads.
        state_dict: values of the parameters, read for this rank's part alone: a model on "meta" needs them, or
        initialise: gives a module without values its values; by default as `initialise_with`.
        device: where the part goes.
        timeout_s: deadline of every exchange between ranks.

    Raises:
        ConfigError: on every rank alike: too few cuts, one that is never or twice reached, control flow that depends
            on data, an unknown key or weight, other models on other ranks.
    """
    ranks = Ranks(replicas=replicas, timeout_s=timeout_s)
    target = None if device is None else torch.device(device)

    def split() -> ModelPart:
        inputs, example, skeleton, traced = trace_model(model, example_batch, split_points, labels)
        names = _first_names(model, shared_weights)
        count = stages or (ranks.stages if split_points is None else len(traced.points) + 1)
        split = SplitTrace(traced, _stage_of(skeleton, traced, ranks.stages, count, costs, memory_limit_bytes))
        _require_parameters(skeleton, split, shared_weights)
        part = ModelPart(model, skeleton, split, example, ranks=ranks, inputs=inputs, names=names)
        fill = initialise or initialise_with(model)
        materialise(part, names, state_dict, fill, target, later=part.received_weights())
        return part

    part = ranks.control.run_on_all(split)
    _warn_of_batch_norm(model, ranks)
    ranks.require_equal(_description(part, model), "the divided model", across=range(ranks.control.size))
    return part


def _warn_of_batch_norm(model: nn.Module, ranks: Ranks) -> None:
    """Warn on rank 0 if a module's statistics would be taken from the whole batch without micro-batches."""
    if ranks.control.rank == 0 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        warnings.warn("BatchNorm takes its statistics from each micro-batch, not from the whole batch", stacklevel=3)


def _description(part: ModelPart, model: nn.Module) -> str:
    """Equal where ranks divide the same model alike."""
    weights = [
        f"{name} {tuple(weight.shape)} {weight.dtype} {'trained' if weight.requires_grad else 'frozen'}"
        for name, weight in model.named_parameters()
    ]
    return "\n".join([part.split.description, *weights])


def _require_parameters(model: nn.Module, split: SplitTrace, shared_weights: Sequence[tuple[str, str]]) -> None:
    """Refuse to share a weight that no stage has."""
    known = {name for stage in range(split.stages) for name in parameter_names(model, split, stage)}
    if missing := [name for pair in shared_weights for name in pair if name not in known]:
        raise ConfigError(
            f"expected a stage to hold the shared weight {missing[0]}, but the forward does not use it",
            hint="name weights that the model uses with the example batch",
        )


def trace_model(
    model: nn.Module, example_batch: Any, split_points: Sequence[str] | None, labels: Sequence[str] = LABELS
) -> tuple[Inputs, Batch, nn.Module, TracedForward]:
    """A model's inputs, an example of them by name, the model without memory, and its forward between cuts."""
    inputs = Inputs.of(model, example_batch, labels)
    skeleton = without_memory(model)
    example = inputs.of_model(inputs.name(example_batch))
    points = cut_points(model) if split_points is None else resolve_split_points(model, split_points)
    return inputs, example, skeleton, trace(skeleton, example, points)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes alone."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _stage_of(
    model: nn.Module,
    traced: TracedForward,
    ranks: int,
    stages: int,
    costs: SegmentCosts | str | Path | None,
    memory_limit_bytes: int | None,
) -> list[int]:
    """The virtual stage of each segment, of so many over the ranks of a pipeline."""
    segments = len(traced.points) + 1
    if ranks == 1:
        return [0] * segments
    if segments < stages:
        raise ConfigError(
            f"expected at least {stages - 1} places to divide the model at for {stages} stages, got {segments - 1}",
            hint="put more CutPoints into the model, name more split points, or use fewer stages",
        )
    if stages % ranks:
        raise ConfigError(
            f"expected a number of stages that {ranks} ranks of a pipeline can share alike, got {stages}",
            hint="name one split point less than there are ranks, or run as many ranks as there are stages",
        )
    if costs is not None:
        costs = costs if isinstance(costs, SegmentCosts) else SegmentCosts.load(Path(costs))
        return divide_segments(costs, traced.points, stages, memory_limit_bytes)
    if segments == stages:
        return list(range(segments))
    weights = segment_parameters(model, SplitTrace(traced, list(range(segments))))
    return stage_of_each(evenest([sum(weight.numel() for weight in segment) for segment in weights], stages))


def _first_names(model: nn.Module, shared_weights: Sequence[tuple[str, str]]) -> dict[str, str]:
    """For each name of a parameter, the first name of those that share it."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(weight), name) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    known = dict(model.named_parameters(remove_duplicate=False))
    for one, other in shared_weights:
        for name in (one, other):
            if name not in known:
                raise ConfigError(f"expected shared weights among the model's parameters, got {name!r}")
        if known[one].shape != known[other].shape:
            raise ConfigError(
                f"expected shared weights of one shape, got {one} of {tuple(known[one].shape)} and {other} of "
                f"{tuple(known[other].shape)}"
            )
        kept = names[one]
        dropped = names[other]
        names = {name: kept if name_of == dropped else name_of for name, name_of in names.items()}
    return names


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

    A tensor with memory stays, unless `state_dict` says otherwise; others' values come from there, under any name that
    shares them, or from `initialise`, or `later` from another stage. Without a `device` meta tensors go to the host.

    Raises:
        ConfigError: a parameter or buffer has no value, or one of another shape.
    """
    filled: dict[int, torch.Tensor] = {}
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
                if id(tensor) not in filled:
                    empty = empty or needed
                    filled[id(tensor)] = _filled(tensor, value, device)
                    if tensor.is_meta and value is None and full in later:
                        filled[id(tensor)].zero_()  # not what the memory held before
                kind[name] = filled[id(tensor)]
        if empty:
            initialise(module)


def _value(
    name: str, tensor: torch.Tensor, names: Mapping[str, str], state_dict: Mapping[str, torch.Tensor] | None
) -> torch.Tensor | None:
    if state_dict is None:
        return None
    same = [other for other, first in names.items() if first == names.get(name)]
    key = next((other for other in (name, *same) if other in state_dict), None)
    if key is None:
        if tensor.is_meta:
            raise ConfigError(
                f"expected a value of {name} in the state dict, got none",
                hint="give a whole state dict, or build the model with memory",
            )
        return None
    value = state_dict[key]
    if value.shape != tensor.shape:
        raise ConfigError(
            f"expected a value of {name} of shape {tuple(tensor.shape)} in the state dict, got {tuple(value.shape)}"
        )
    return value


def _filled(tensor: torch.Tensor, value: torch.Tensor | None, device: torch.device | None) -> torch.Tensor:
    """The tensor with memory and, if there is one, the value; the same object where that is possible."""
    target = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
    filled = tensor
    if tensor.device != target:
        filled = torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.data.to(target)
        if isinstance(tensor, nn.Parameter):
            filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
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
