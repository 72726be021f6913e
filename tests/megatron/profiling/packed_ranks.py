"""What the rank of the packed profile's tests runs: tables of packed rows, halves, and what others then take."""

from dataclasses import replace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dynapipe.core.costs import LAYER_KINDS, PEAK_UNIT, WEIGHT_UNIT, Rates
from megatron_dynapipe.core.executor import Mark
from megatron_dynapipe.core.units import BYTES_PER_MB, ModelFamily, Recompute, Shape, round_up
from megatron_dynapipe.costing.tabulate import PartTables
from megatron_dynapipe.megatron.profiling import division as profiled
from megatron_dynapipe.megatron.profiling.layers import build_parts, only
from megatron_dynapipe.megatron.profiling.measure import Scope
from megatron_dynapipe.megatron.profiling.packed import MeasuredRows, Row, measure_rows, of_row, row_tables
from megatron_dynapipe.megatron.profiling.setup import prepared
from megatron_dynapipe.runtime.platform import CpuPlatform, platform_of
from tests.helpers.stage_costs import parts_of

WITHIN = Shape(size=8, input_length=64, target_length=32)
LONG = Shape(size=1, input_length=1024, target_length=32)
OTHER = (40, 3, 24, 61, 8), (12, 30, 2, 7, 25)


def tables(rank: int, world_size: int, flags: list[str], family: str) -> dict[str, object]:
    """Names of the tables, and for each layer and mode (predicted, measured) MB that the row `OTHER` stores."""
    with prepared(flags, ModelFamily(family), tensor_parallel=1, vocabulary=512) as setup:
        parts = build_parts(setup)
        scope = Scope(
            parts=parts,
            modes=list(Recompute),
            within=WITHIN,
            most_positions=1024,
            platform=platform_of(torch.device("cpu")),
            hurried=True,
        )
        rows = measure_rows(scope, 0.0)  # the fewest rows are measured also beyond the budget
        by_mode = {mode: row_tables(scope, rows, mode) for mode in scope.modes}
        stored = {
            f"{name}, {mode}": (
                _at(of_mode["stored_activation_mb"][name], OTHER, decoder=name == "decoder"),
                _measured(scope, name, mode),
            )
            for mode, of_mode in by_mode.items()
            for name in parts
            if name in ("encoder", "decoder")
        }
        return {
            "names": {mode.value: {q: sorted(of_mode[q]) for q in of_mode} for mode, of_mode in by_mode.items()},
            "stored": stored,
            "halves": _halves(scope, rows),
            "prefixes": _prefixes(replace(scope, within=LONG)),
            "weights": _weights(replace(scope, platform=OperationsClock())),
        }


class OperationsClock(CpuPlatform):
    """A device on which time passes by the operations of products: a ns each."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False)

    def mark(self) -> Mark:
        done = self.counter.get_total_flops()
        return lambda: done


def _weights(scope: Scope) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """By kind of layer, [once, by position, by position of the encoder's output] of weight gradients.

    As measured padded, as measured in packed rows, and counted: two operations for each element of the weights.
    """
    measured = {}
    assert isinstance(scope.platform, OperationsClock)
    for kind in set(scope.parts) & set(LAYER_KINDS):
        with scope.platform.counter:
            times = [profiled.weight_time(scope, kind, packed=packed) for packed in (False, True)]
        matrices = {
            name: 2 * weight.numel()
            for name, weight in scope.parts[kind].module.named_parameters()
            if weight.dim() == 2
        }
        keys = sum(count for name, count in matrices.items() if "cross_attention.linear_kv" in name)
        in_ns = [[once, *(rate / WEIGHT_UNIT for rate in rates)] for once, *rates in filter(None, times)]
        measured[kind] = (*in_ns, [0, sum(matrices.values()) - keys, keys])
    return measured


def _prefixes(scope: Scope) -> dict[str, list[list[float]]]:
    """By mode [forward, backward, stored, peak; once, by position, by pair] of pieces."""
    return {mode.value: costs.tolist() for mode, costs in profiled.prefixes(scope).items()}


def _halves(scope: Scope, rows: MeasuredRows) -> dict[str, tuple[float, float]]:
    """(predicted, measured) bytes that halves store and need, in a padded micro-batch and in `OTHER`."""
    pairs, padded = {}, profiled.padded_halves(scope)
    packed = profiled.packed_halves(scope, rows, padded)
    for kind, mode in padded:
        inputs, targets = OTHER if kind == "decoder" else (OTHER[0], ())
        shape = [40, 24] if kind == "decoder" else [40]
        for layout, halves, part, point, lengths in (
            ("padded", padded, scope.parts[kind], (3, *shape), ([n] * 3 for n in shape)),
            ("packed", packed, of_row(scope.parts[kind], (inputs, targets)), (), filter(None, (inputs, targets))),
        ):
            *of_encoder, queries = lengths
            encoder = of_encoder[0] if of_encoder else [0] * len(queries)
            keys = [n + m for n, m in zip(queries, encoder, strict=True)]
            part.set_recompute(mode)
            layer = scope.measure(part, point, timed=False)
            for at, half in enumerate(("attention", "mlp")):
                with only(half, part):
                    measured = scope.measure(part, point, timed=False)
                assert layer is not None and measured is not None
                division = halves[kind, mode][0]
                assert division.peak is not None
                name = f"{layout} {kind}, {mode}, {half}"
                of = division.peak[at]
                linears, inside, _ = parts_of(Rates(of.linear, of.inner, 0, of.memory), queries, keys, encoder)
                pairs[f"{name}, peak"] = (of.once + (linears + inside) / PEAK_UNIT, measured.peak_bytes)
                linears, inside, mlp = parts_of(division.stored[at], queries, keys, encoder)
                share = (linears + inside, mlp)[at] / (linears + inside + mlp)
                pairs[f"{name}, stored"] = (share * layer.stored_bytes, measured.stored_bytes)
    return pairs


def _measured(scope: Scope, name: str, mode: Recompute) -> float:
    part = scope.parts[name]
    part.set_recompute(mode)
    row = OTHER if name == "decoder" else (OTHER[0], ())
    values = scope.measure(of_row(part, row), ())
    assert values is not None
    return values.stored_bytes / BYTES_PER_MB


def _at(tables: PartTables, row: Row, *, decoder: bool) -> float:
    """A row's costs by the tables: the linear part between its corners, attention by the coefficients behind it."""
    linear, attention = tables
    high, inputs, targets = 2**20, np.array(row[0]), np.array(row[1])
    if not decoder:
        rate = (linear[str(high)] - linear["8"]) / (high - 8)
        pairs = (attention["64"] - attention["1"]) / (64**2 - 1)
        sample = attention["1"] - pairs
        return float(linear["8"] + rate * (round_up(int(inputs.sum())) - 8) + (sample + pairs * inputs**2).sum())
    rates = [(linear[key] - linear["8,8"]) / (high - 8) for key in (f"{high},8", f"8,{high}")]
    total = linear["8,8"] + sum(
        rate * (round_up(int(lengths.sum())) - 8) for rate, lengths in zip(rates, (inputs, targets), strict=True)
    )
    at = [(1, 1), (64, 1), (1, 32)]
    terms = np.array([[1, t * t, s * t] for s, t in at])
    sample, squared, cross = np.linalg.solve(terms, [attention[f"{s},{t}"] for s, t in at])
    return float(total + (sample + squared * targets**2 + cross * inputs * targets).sum())
