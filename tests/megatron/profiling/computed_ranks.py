"""What two ranks count of models that Megatron has built, beside what costs computed from their shapes say."""

import functools
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.training.global_vars import unset_global_variables
from torch.utils.flop_counter import FlopCounterMode

from megatron_dynapipe.cli.model_config import read_model
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import CPU_RATES, AnalyticCostModel, ModelShape, Network, PipelineLayout, model_of_layers
from megatron_dynapipe.costing.analytic import layer_costs
from megatron_dynapipe.costing.experts import with_expert_parallel
from megatron_dynapipe.costing.state import parameter_bytes
from megatron_dynapipe.costing.work import LayerWork
from megatron_dynapipe.megatron.equip.built import built_stages
from megatron_dynapipe.megatron.flags.layer_split import layers_of_stacks
from megatron_dynapipe.megatron.profiling.layers import MeasuredModule, Point, build_parts
from megatron_dynapipe.megatron.profiling.setup import ProfileSetup, prepared
from megatron_dynapipe.runtime.memory import pass_memory

CPU = torch.device("cpu")
SIZE, INPUTS, TARGETS = 4, 64, 32
VOCABULARY = 500
_MACHINE = ("vocabulary", "vocabulary_multiple", "fused")
Pairs = dict[str, tuple[Any, Any]]
"""(computed, counted) by name."""


def counted(rank: int, world_size: int, models: dict[str, tuple[str, list[str]]], folder: str) -> dict[str, Pairs]:
    """Parameters of this rank under both kinds of parallelism; FLOPs and kept bytes of one layer; by model."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, begin, groups = dist.TCPStore(host, port), dist.init_process_group, itertools.count()

    def apart(backend: str) -> None:
        """Groups that are made again want keys of their own."""
        begin(backend, store=dist.PrefixStore(f"groups{next(groups)}", store), rank=rank, world_size=world_size)

    dist.init_process_group = apart
    return {name: _counted(family, flags, Path(folder, f"{rank}.yaml")) for name, (family, flags) in models.items()}


def _counted(family: str, flags: list[str], path: Path) -> Pairs:
    prepare = functools.partial(prepared, flags, ModelFamily(family), vocabulary=VOCABULARY)
    found: Pairs = {}
    for name in ("pipeline", "tensor", *(["expert"] if "--num-experts" in flags else [])):
        layout = {f"{name}_parallel": 2}
        sequence = ["--sequence-parallel"] if name == "tensor" and "--num-experts" in flags else []
        with prepared([*flags, *sequence], ModelFamily(family), vocabulary=VOCABULARY, **layout) as setup:
            found |= {f"{name} parameters": _parameters(setup, **layout)}
        unset_global_variables()
    with prepare() as setup:
        shape = setup.shape
        parts = build_parts(setup, chained=2)
        for kind in ("encoder", "decoder", "expert"):
            if kind in parts:
                found |= _layer(kind, shape.dense if kind == "encoder" else shape, parts[kind])
        found["as the file says"] = (_of_file(flags, path), _without_machine(shape))
    unset_global_variables()
    return found


def _parameters(
    setup: ProfileSetup, *, pipeline_parallel: int = 1, tensor_parallel: int = 1, expert_parallel: int = 1
) -> tuple[int, int]:
    stage = torch.distributed.get_rank() % pipeline_parallel
    (built,) = built_stages(setup.args, setup.family, setup.layout)
    shape = setup.shape
    layers = layers_of_stacks(setup.args, setup.family)
    expert_layers = shape.experts.layers if shape.experts else ()
    layout = PipelineLayout.equal(
        model_of_layers(setup.family, *layers, expert_layers=expert_layers), pipeline_parallel
    )
    costs = AnalyticCostModel(shape, CPU_RATES, max_size=1, max_length=8)
    tables = costs.tables(tensor_parallel=tensor_parallel, recompute=Recompute.NONE)
    shared = with_expert_parallel(
        tables, Network(), Recompute.NONE, ranks=expert_parallel, tensor_parallel=tensor_parallel
    )
    state = shared.state
    computed = parameter_bytes(layout, state)[stage] // 2
    return int(computed), sum(parameter.numel() for parameter in built.parameters())


def _layer(kind: str, shape: ModelShape, part: MeasuredModule) -> Pairs:
    work, found = LayerWork(shape=shape, element_bytes=4), {}
    b, s, t = (torch.tensor(float(n)).numpy() for n in (SIZE, INPUTS, TARGETS))
    computed = work.decoder(b, t, s) if kind == "decoder" else work.encoder(b, s)
    point = (SIZE, INPUTS, TARGETS) if kind == "decoder" else (SIZE, INPUTS)
    found[f"{kind} FLOPs"] = (float(computed.linear_flops + computed.core_flops), _of_second(part, point, _flops))
    for mode in (Recompute.NONE, Recompute.SELECTIVE):
        part.set_recompute(mode)
        kept = float(layer_costs(computed, CPU_RATES, mode)[2])
        found[f"{kind} bytes kept under {mode}"] = (kept, _of_second(part, point, _kept))
    return found


def _of_second(part: MeasuredModule, point: Point, count: Any) -> float:
    """Of one of two layers: what both need besides, such as a stage's biases, counts once."""
    assert part.alone is not None
    return float(count(part.prepare(point)) - count(part.alone.prepare(point)))


def _flops(forward: Any) -> int:
    formulas = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._grouped_mm: _grouped_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        forward()
    return int(counter.get_total_flops())


def _attention_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    b, heads, queries, channels = query
    return int(4 * b * heads * queries * key[2] * channels)


def _grouped_flops(tokens: Any, weights: Any, *_: Any, **__: Any) -> int:
    return int(2 * tokens[0] * tokens[1] * weights[-1])


def _kept(forward: Any) -> int:
    def backward(output: torch.Tensor) -> None:
        torch.autograd.backward(output, torch.ones_like(output))

    return pass_memory(forward, backward, CPU).stored_bytes


def _of_file(flags: list[str], path: Path) -> dict[str, Any]:
    """The shape that `--model-config` reads from the same flags in a run file."""
    entries: dict[str, Any] = {}
    for at, flag in enumerate(flags):
        if flag.startswith("--"):
            value = flags[at + 1] if at + 1 < len(flags) and not flags[at + 1].startswith("--") else "true"
            entries[flag[2:]] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(entries))
    found = read_model(path)
    return _without_machine(ModelShape(family=found.model, vocabulary=VOCABULARY, **found.shape))


def _without_machine(shape: ModelShape) -> dict[str, Any]:
    """Without what a file does not say: the vocabulary, and the machine."""
    fields = ((name, getattr(shape, name)) for name in shape.__struct_fields__ if name not in _MACHINE)
    return {name: str(value) for name, value in fields}
