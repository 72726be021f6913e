"""Measures the segments of a model on the device at hand, for planning and for choosing where to divide it."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.costing.document import UNITS, Table
from megatron_dynapipe.modules.boundary import Specialization
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.part import Variants, kind_of, segment_parameters
from megatron_dynapipe.modules.program import SplitTrace
from megatron_dynapipe.modules.split import trace_model
from megatron_dynapipe.runtime import Entry, StageGraph
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.links import measure_links
from megatron_dynapipe.runtime.memory import pass_memory
from megatron_dynapipe.segments import Segment, SegmentCosts

_REPEATS = 5


def profile_module(
    model: nn.Module,
    get_batch: Callable[[int, int], object],
    sizes: Sequence[int],
    lengths: Sequence[int],
    *,
    split_points: Sequence[str] | None = None,
    name: str = "module",
    repeats: int = _REPEATS,
) -> SegmentCosts:
    """Measure every segment between cut points over a grid of micro-batch shapes.

    On a rank of a process group all ranks call it; each measures, and rank 0's costs, with the links between ranks,
    are what all of them return.

    Args:
        model: the whole model, on the device that it is to be measured on.
        get_batch: makes the model's arguments for a micro-batch of a size and a length.
        sizes: samples of a micro-batch.
        lengths: positions of a sample.
        split_points: places at which the model may be divided, as `split_model` takes them; by default its CutPoints.
        name: the model's, for people.
        repeats: how often everything is measured; the median counts.

    Raises:
        ConfigError: as `split_model`.
    """
    device = next(model.parameters()).device
    inputs, example, skeleton, traced = trace_model(model, get_batch(max(sizes), max(lengths)), split_points)
    segments = list(range(len(traced.points) + 1))
    split = SplitTrace(traced, segments)
    kind = kind_of(example, model.training, None, device)
    variants = Variants(skeleton, segments, segments, model.get_submodule)
    variants.add(kind, split)
    tables: list[dict[str, Table]] = [{} for _ in segments]
    for length in lengths:
        for size in sizes:
            named = inputs.of_model(inputs.name(get_batch(size, length)))
            batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in named.items()}
            specialization = variants.specialize(batch, kind)
            received: Sequence[torch.Tensor] = ()
            for segment, table in enumerate(tables):
                forward = partial(_forward, specialization, segment, received, batch, device)
                quantities, received = _costs(forward, device, repeats)
                for quantity, value in quantities.items():
                    table.setdefault(quantity, {}).setdefault(str(length), []).append((size, round(value, 6)))
    model.zero_grad(set_to_none=True)
    weights = segment_parameters(skeleton, split)
    names = ("", *traced.points)
    costs = SegmentCosts(
        kind="segments",
        name=name,
        source="megatron_dynapipe.modules.profile_module",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        units={**UNITS, "time": "ms for one segment, one micro-batch"},
        segments=tuple(map(_segment, names, weights, tables)),
        links=_links(device),
    )
    return _of_first_rank(costs)


def _segment(name: str, weights: Sequence[nn.Parameter], tables: Mapping[str, Table]) -> Segment:
    return Segment(
        name=name,
        parameters=sum(weight.numel() for weight in weights if weight.requires_grad),
        frozen_mb=sum(weight.nbytes for weight in weights if not weight.requires_grad) / BYTES_PER_MB,
        time_ms={"forward": tables["forward"], "backward": tables["backward"]},
        stored_activation_mb=tables["stored"],
        peak_activation_mb=tables["peak"],
        boundary_mb=tables["boundary"],
    )


_Passed = tuple[StageGraph, Sequence[torch.Tensor]]
"""A segment's forward pass: the graph, and the tensors that it sends, or at the last one that the model returns."""


def _forward(
    specialization: Specialization, segment: int, received: Sequence[torch.Tensor], batch: Batch, device: torch.device
) -> _Passed:
    boundary = specialization.boundaries[segment - 1] if segment else ()
    entry = Entry([tensor.clone() for tensor in received], [meta.differentiable for meta in boundary])
    output = specialization.runs[segment](entry.tensors, batch, device)
    sent = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return StageGraph.to_outputs(entry, sent), sent


def _backward(passed: _Passed) -> None:
    graph, sent = passed
    graph.backward([torch.ones_like(tensor) for tensor in sent])


def _costs(
    forward: Callable[[], _Passed], device: torch.device, repeats: int
) -> tuple[dict[str, float], Sequence[torch.Tensor]]:
    """Milliseconds and MB of a segment's passes, and what it sends."""
    memory = pass_memory(forward, _backward, device)
    times = [_time_once(forward, device) for _ in range(repeats)]
    _, sent = forward()
    costs = {
        "forward": median(forward_ms for forward_ms, _ in times),
        "backward": median(backward_ms for _, backward_ms in times),
        "stored": memory.stored_bytes / BYTES_PER_MB,
        "peak": max(memory.peak_bytes, memory.stored_bytes) / BYTES_PER_MB,
        "boundary": sum(tensor.nbytes for tensor in sent) / BYTES_PER_MB,
    }
    return costs, [tensor.detach() for tensor in sent]


def _time_once(forward: Callable[[], _Passed], device: torch.device) -> tuple[float, float]:
    marks = [_now(device)]
    passed = forward()
    marks.append(_now(device))
    _backward(passed)
    marks.append(_now(device))
    return (marks[1] - marks[0]) / 1e6, (marks[2] - marks[1]) / 1e6


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def _links(device: torch.device) -> dict[str, Link]:
    return measure_links(device) if dist.is_initialized() and dist.get_world_size() > 1 else {}


def _of_first_rank(costs: SegmentCosts) -> SegmentCosts:
    """The costs that rank 0 measured: all ranks must plan with the same."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return costs
    control = ControlGroup(timeout_s=300.0)
    return SegmentCosts.decode(control.broadcast_text(msgspec.json.encode(costs).decode()).encode())
