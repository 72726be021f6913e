"""What the rank of the chained layers' tests runs: one layer's measurements against those of several together."""

from dataclasses import replace

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.megatron.profiling.layers import MeasuredModule, build_parts, only
from megatron_dynapipe.megatron.profiling.measure import measure
from megatron_dynapipe.megatron.profiling.setup import prepared
from megatron_dynapipe.runtime.platform import platform_of

POINTS = {"encoder": (2, 32), "decoder": (2, 32, 16), "postprocess": (2, 32)}


def compare(rank: int, world_size: int, flags: list[str], family: str) -> dict[str, dict[str, object]]:
    """By number of chained layers, of every part: layers, parameters, and bytes that each mode stores and needs."""
    platform = platform_of(torch.device("cpu"))
    results: dict[str, dict[str, object]] = {}
    with prepared(flags, ModelFamily(family), tensor_parallel=1, vocabulary=512) as setup:
        for chained in (1, 3):
            parts = build_parts(setup, chained=chained)
            for name, part in parts.items():
                costs = {}
                for mode in (Recompute.NONE, Recompute.FULL) if name in ("encoder", "decoder") else (Recompute.NONE,):
                    part.set_recompute(mode)
                    for chain in part.from_most_layers:
                        memory = measure(chain, POINTS[name], platform, shared=True)
                        costs[f"{mode}, {chain.layers}"] = (memory.stored_bytes, memory.peak_bytes)
                results[f"{name}, {chained}"] = {"parameters": part.parameters, "costs": costs}
        results["halves"] = {mode.value: _half_a_layer_last(parts["encoder"], mode) for mode in Recompute}
    return results


def _half_a_layer_last(three: MeasuredModule, mode: Recompute) -> list[tuple[int, int]]:
    """(stored, peak) of one layer, its attention, its MLP, and of three layers without the last one's MLP."""
    one, last = three.alone, [module for module in three.module.modules() if isinstance(module, TransformerLayer)][-1]
    assert one is not None
    three.set_recompute(mode)

    def memory(part: MeasuredModule) -> tuple[int, int]:
        results = measure(part, POINTS["encoder"], platform_of(torch.device("cpu")), shared=True, timed=False)
        return results.stored_bytes, results.peak_bytes

    results = [memory(one)]
    for half in ("attention", "mlp"):
        with only(half, one):
            results.append(memory(one))
    with only("attention", replace(three, module=last, alone=None)):
        return [*results, memory(replace(three, layers=1))]
