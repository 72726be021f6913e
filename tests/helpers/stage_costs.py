"""What a layout makes each virtual stage cost, from one layer's costs: the rules of `csrc/costs.cpp` in numpy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.cost.tables import ABSENT, LARGEST_COST, IntArray, LayerTables, Row


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
    """The part of the backward that a divided pass runs as its second half."""
    feasible: np.ndarray[tuple[int], np.dtype[np.bool_]]


_ROWS = 7
"""Rows of `_by_size`: forward, backward, stored, the peaks of the encoder's and the decoder's layers and the head,
and the second half of a divided backward."""


def _by_size(tables: LayerTables, layout: PipelineLayout, inputs: IntArray, targets: IntArray) -> IntArray:
    """Stage costs at every size of the grid: `[queries, virtual stages, _ROWS, sizes]`.

    `ABSENT` where the tables are, and where a cost of the stage is above `LARGEST_COST`.

    A stage's forward (backward) is the sum of its layers', halves of layers among them, plus the head on the last, and
    so is what it stores, plus the encoder's output where it has decoder layers alone; its peak is the largest, over its
    layers, their halves and the head, of what those before it stored, that one's own peak, and what attention at the
    stage's end stored.
    """
    layer_costs = tables.of_stages_at_lengths(inputs, targets)
    row = {r: layer_costs[:, :, r, :] for r in Row}
    e, d = (_on_stages(parts, row, kind) for parts, kind in _parts_of(layout))
    last = np.zeros((layout.virtual_stages, 1), np.int64)
    last[-1] = 1
    given = (~e.present & d.present) * row[Row.ENCODED_STORED]
    layers_stored = given + e.stored + d.stored
    costs = np.stack(
        [
            e.forward + d.forward + last * row[Row.HEAD_FORWARD],
            e.backward + d.backward + last * row[Row.HEAD_BACKWARD],
            layers_stored + last * row[Row.HEAD_STORED],
            e.end,
            np.where(d.present, given + e.stored + d.end, 0),
            last * (layers_stored + row[Row.HEAD_PEAK]),
            e.weight + d.weight,
        ],
        axis=2,
    )
    absent = (layer_costs[:, :, None, 0, :] == ABSENT) | (costs > LARGEST_COST).any(axis=2, keepdims=True)
    return np.where(absent, ABSENT, costs)


_KINDS = ("ENCODER", "DECODER")


def _parts_of(layout: PipelineLayout) -> list[tuple[IntArray, str]]:
    """The stages' encoder layers and their decoder layers, as `Parts`."""
    return list(zip((layout.encoder_parts, layout.decoder_parts), _KINDS, strict=True))


class _Layers(NamedTuple):
    """All layers of one kind on every stage: `[queries, virtual stages, sizes]`."""

    present: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    """[virtual stages, 1]"""
    forward: IntArray
    backward: IntArray
    stored: IntArray
    end: IntArray
    """The highest peak, above what is stored before the first of them."""
    weight: IntArray


def _on_stages(parts: IntArray, row: Mapping[Row, IntArray], kind: str) -> _Layers:
    mlp, whole, attention = (count[:, None] for count in parts.T)

    def time(way: str) -> IntArray:
        layer, its_attention = row[Row[f"{kind}_{way}"]], row[Row[f"{kind}_ATTENTION_{way}"]]
        return np.asarray(whole * layer + attention * its_attention + mlp * (layer - its_attention))

    parts_of_layer = ("MLP_", "", "ATTENTION_")
    its_mlp, layer, its_attention = (row[Row[f"{kind}_{part}STORED"]] for part in parts_of_layer)
    mlp_peak, peak, attention_peak = (row[Row[f"{kind}_{part}PEAK"]] for part in parts_of_layer)
    stored = mlp * its_mlp + whole * layer + attention * its_attention
    # What attention stored may still be held when what is before it peaks: recomputed in full, it is the output.
    ends = (
        mlp * (mlp_peak + attention * its_attention),
        (whole > 0) * (stored - layer + peak),
        attention * (stored - its_attention + attention_peak),
    )
    return _Layers(
        present=parts.sum(axis=1, keepdims=True) > 0,
        forward=time("FORWARD"),
        backward=time("BACKWARD"),
        stored=stored,
        end=np.maximum.reduce(np.broadcast_arrays(*ends)),
        weight=time("WEIGHT"),
    )


def stage_costs(
    tables: LayerTables, layout: PipelineLayout, sizes: IntArray, inputs: IntArray, targets: IntArray
) -> StageCosts:
    """Costs of micro-batches of the given shapes on every virtual stage.

    Args:
        tables: one layer's costs.
        layout: layers per virtual stage.
        sizes: int64[queries], samples of each micro-batch.
        inputs: int64[queries], padded input lengths.
        targets: int64[queries], padded target lengths; 0 for decoder-only models.
    """
    costs_by_size = _by_size(tables, layout, inputs, targets)
    flat = costs_by_size.reshape(len(sizes), -1, len(tables.sizes))
    rows = tables.at_sizes(flat, sizes).reshape(len(sizes), layout.virtual_stages, _ROWS)
    stored = rows[:, :, 2]
    return StageCosts(
        forward_ns=rows[:, :, 0],
        backward_ns=rows[:, :, 1],
        stored_bytes=stored,
        peak_bytes=np.maximum(rows[:, :, 3:6].max(axis=2), stored),
        weight_ns=np.minimum(rows[:, :, 6], rows[:, :, 1]),
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
