"""What modules make each virtual stage cost, by the rules of `csrc/costs/tables.cpp`; and tables to try them on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.core.costs import ATTENTION, HEAD, MLP, IntArray, Rates
from megatron_dynapipe.costing import ABSENT, LARGEST_COST, CostTables, Kind, ModelState, PipelineLayout, Quantity

GPT_KINDS: tuple[Kind, ...] = (ATTENTION, MLP, HEAD)
STATE = ModelState(embedding_bytes=1, modules={ATTENTION: 1, MLP: 1})


def grid_values(kinds: tuple[Kind, ...], costs: Mapping[tuple[Kind, Quantity], object], *shape: int) -> IntArray:
    """int64 `[kinds, len(Quantity), *shape]` from the costs that are not 0."""
    values = np.zeros((len(kinds), len(Quantity), *shape), np.int64)
    for (kind, quantity), grid in costs.items():
        values[kinds.index(kind), quantity] = grid
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """What micro-batches cost on every virtual stage: int64 `[queries, virtual stages]`, in ns and bytes.

    Where `feasible` (bool `[queries]`) is False the other values mean nothing.
    """

    forward_ns: IntArray
    backward_ns: IntArray
    stored_bytes: IntArray
    peak_bytes: IntArray
    weight_ns: IntArray
    feasible: np.ndarray[tuple[int], np.dtype[np.bool_]]


def _of_stage(costs: IntArray, modules: list[int]) -> IntArray:
    """A stage's costs, `[queries, rows, sizes]`, from those of modules, `[queries, kinds, len(Quantity), sizes]`.

    Rows are forward, backward, stored, the peak of the first module, weights, and the peak of the last of each kind.
    """
    kinds = costs.shape[1]
    stage = np.zeros((len(costs), Quantity.ENTRY_STORED + kinds, costs.shape[-1]), np.int64)
    if not modules:
        return stage
    first, of_modules = costs[:, modules[0]], costs[:, modules]
    stage[:, : Quantity.ENTRY_STORED] = of_modules[:, :, : Quantity.ENTRY_STORED].sum(axis=1)
    before = first[:, Quantity.ENTRY_STORED].copy()
    stage[:, Quantity.PEAK] = first[:, Quantity.ENTRY_PEAK]
    for kind in modules:
        if (peak := costs[:, kind, Quantity.PEAK]).any():
            stage[:, Quantity.ENTRY_STORED + kind] = before + peak
        before += costs[:, kind, Quantity.STORED]
    stage[:, Quantity.STORED] = before
    absent = (of_modules == ABSENT).any(axis=(1, 2))[:, None] | (stage > LARGEST_COST).any(axis=1, keepdims=True)
    return np.where(absent, ABSENT, stage)


def stage_costs(
    tables: CostTables, layout: PipelineLayout, sizes: IntArray, inputs: IntArray, targets: IntArray
) -> StageCosts:
    """Costs of micro-batches of the given shapes on every virtual stage."""
    costs = tables.at_lengths(inputs, targets)
    modules = [tables.kinds.index(kind) for kind in layout.modules]
    ends = [*layout.cuts.tolist(), len(modules)]
    stages = [modules[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    by_size = np.stack([_of_stage(costs, stage) for stage in stages], axis=1)
    rows = tables.at_sizes(by_size, sizes)
    return StageCosts(
        forward_ns=rows[:, :, Quantity.FORWARD],
        backward_ns=rows[:, :, Quantity.BACKWARD],
        stored_bytes=rows[:, :, Quantity.STORED],
        peak_bytes=rows[:, :, [Quantity.PEAK, Quantity.STORED, *range(Quantity.ENTRY_STORED, rows.shape[2])]].max(
            axis=2
        ),
        weight_ns=np.minimum(rows[:, :, Quantity.WEIGHT], rows[:, :, Quantity.BACKWARD]),
        feasible=(rows[:, :, 0] != ABSENT).all(axis=1),
    )


def boundary_bytes(
    layout: PipelineLayout, hidden: int, sizes: IntArray, inputs: IntArray, targets: IntArray, element_bytes: int = 2
) -> tuple[IntArray, IntArray]:
    """Bytes over every boundary: (activations downstream, gradients upstream), each `[queries, virtual stages - 1]`.

    These are what a cost model charges: see `PipelineLayout.decoder_state_forward` and `decoder_state_backward`.
    """
    input_state = (sizes * inputs * hidden * element_bytes)[:, None]
    target_state = (sizes * targets * hidden * element_bytes)[:, None]
    forward, backward = (
        np.array(both, np.int64) for both in (layout.decoder_state_forward, layout.decoder_state_backward)
    )
    return input_state + forward * target_state, input_state + backward * target_state


def parts_of(
    rates: Rates, lengths: Sequence[int], keys: Sequence[int], encoder: Sequence[int] = ()
) -> tuple[int, int, int]:
    """What some samples cost in attention's linears, attention's inside and the MLP, in the unit of the rates.

    Attention reads a sample's `keys` positions: its own, those of pieces before it, and the encoder's for a decoder.
    """
    positions, pairs = sum(lengths), sum(n * k for n, k in zip(lengths, keys, strict=True))
    return rates.linear * positions + rates.memory * sum(encoder), rates.inner * pairs, rates.mlp * positions
