"""What the rank of the packed profile's tests runs: tables of packed rows, and what another row then takes."""

from dataclasses import replace

import numpy as np
import torch

from megatron_dynapipe.cost.tabulate import PartTables
from megatron_dynapipe.integration.profiling.division import DivisionProfiler
from megatron_dynapipe.integration.profiling.layers import build_parts
from megatron_dynapipe.integration.profiling.measure import Scope
from megatron_dynapipe.integration.profiling.packed import PackedProfiler, Row, _of_row
from megatron_dynapipe.integration.profiling.setup import prepared
from megatron_dynapipe.runtime.platform import platform_of
from megatron_dynapipe.units import BYTES_PER_MB, ModelFamily, Recompute, Shape, round_up

WITHIN = Shape(size=8, input_length=64, target_length=32)
LONG = Shape(size=1, input_length=1024, target_length=32)
OTHER = Row((40, 3, 24, 61, 8), (12, 30, 2, 7, 25))


def tables(rank: int, world_size: int, flags: list[str], family: str) -> dict[str, object]:
    """Names of the tables, and for each layer and mode (predicted, measured) MB that the row `OTHER` stores."""
    with prepared(flags, ModelFamily(family), tensor_parallel=1, vocabulary=512) as setup:
        parts = build_parts(setup.model, setup.device)
        scope = Scope(
            parts=parts,
            modes=[Recompute.NONE, Recompute.FULL],
            within=WITHIN,
            most_positions=1024,
            platform=platform_of(torch.device("cpu")),
        )
        found = PackedProfiler(scope=scope).run(0.0)  # the fewest rows are measured also beyond the budget
        stored = {
            f"{name}, {mode}": (
                _at(made["stored_activation_mb"][name], OTHER, decoder=name == "decoder"),
                _measured(scope, name, mode),
            )
            for mode, made in found.items()
            for name in parts
            if name in ("encoder", "decoder")
        }
        return {
            "names": {mode.value: {q: sorted(made[q]) for q in made} for mode, made in found.items()},
            "stored": stored,
            "prefix": _prefix(replace(scope, within=LONG)),
        }


def _prefix(scope: Scope) -> list[list[float]] | None:
    """[forward, backward, stored, peak; once, by position, by pair] of pieces."""
    found = DivisionProfiler(scope=scope).prefix()
    return None if found is None else found.tolist()


def _measured(scope: Scope, name: str, mode: Recompute) -> float:
    part = scope.parts[name]
    part.set_recompute(mode)
    row = OTHER if name == "decoder" else Row(OTHER.inputs, ())
    found = scope.measure(_of_row(part, row), ())
    assert found is not None
    return found.stored_bytes / BYTES_PER_MB


def _at(made: PartTables, row: Row, *, decoder: bool) -> float:
    """A row's costs by the tables: the linear part between its corners, attention by the coefficients behind it."""
    linear, attention = made
    high, inputs, targets = 2**20, np.array(row.inputs), np.array(row.targets)
    if not decoder:
        rate = (linear[str(high)] - linear["8"]) / (high - 8)
        pairs = (attention["64"] - attention["1"]) / (64**2 - 1)
        each = attention["1"] - pairs
        return float(linear["8"] + rate * (round_up(int(inputs.sum())) - 8) + (each + pairs * inputs**2).sum())
    rates = [(linear[key] - linear["8,8"]) / (high - 8) for key in (f"{high},8", f"8,{high}")]
    total = linear["8,8"] + sum(
        rate * (round_up(int(lengths.sum())) - 8) for rate, lengths in zip(rates, (inputs, targets), strict=True)
    )
    at = [(1, 1), (64, 1), (1, 32)]
    terms = np.array([[1, t * t, s * t] for s, t in at])
    each, own, cross = np.linalg.solve(terms, [attention[f"{s},{t}"] for s, t in at])
    return float(total + (each + own * targets**2 + cross * inputs * targets).sum())
