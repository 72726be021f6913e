"""The costs of modules, from what was measured of whole layers.

Profiles measure layers, files hold them. A layer's attention takes its share of the layer's costs by the proportions of
`costing.division`, its MLP the rest; a share depends on lengths and is taken at every point of a grid. In packed rows'
own tables what is linear in positions is divided by linears, and attention of each sample is attention's.

    layer        forward  backward  stored  peak          attention   shares of times and of what is stored; the peak
                                                   ──►    mlp         the rest; above what attention stores, nothing

A stage that begins with an MLP keeps that one's input where attention would have kept its own in its place.

Weight gradients, the second half of a divided backward pass, take what was measured of them by themselves; without a
measurement, as linear layers' forward pass multiplies as often, the layer's forward without attention's inside. A layer
that is recomputed in full is not divided.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_dynapipe.core.costs import (
    ABSENT,
    ATTENTION,
    DECODER_ATTENTION,
    DECODER_MLP,
    EXPERT_MLP,
    HEAD,
    MLP,
    PEAK_UNIT,
    WEIGHT_UNIT,
    Division,
    Floats,
    IntArray,
    Kind,
    LayerKind,
    Peak,
    Quantity,
    Rates,
)

_PARTS = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""

_KINDS: Mapping[LayerKind, tuple[Kind, Kind]] = {
    "encoder": (ATTENTION, MLP),
    "decoder": (DECODER_ATTENTION, DECODER_MLP),
    "expert": (ATTENTION, EXPERT_MLP),
}
"""The modules of a layer. Layers with experts have the attention of the others."""

Part = LayerKind | Literal["postprocess", "encoder_output"]
"""The parts that files have tables of."""

Layers = Mapping[tuple[Part, Quantity], IntArray]
"""Grids of whole layers, of the head and of the encoder's output; what is left out is 0."""


def kinds_of(layers: Mapping[LayerKind, object]) -> tuple[Kind, ...]:
    """Kinds of modules of a model with these kinds of layers."""
    return (*dict.fromkeys(kind for layer in layers for kind in _KINDS[layer]), HEAD)


def parameter_bytes(layers: Mapping[LayerKind, int], divisions: Mapping[LayerKind, Division]) -> dict[Kind, int]:
    """Parameter bytes of modules, from layers' bytes."""
    state: dict[Kind, int] = {}
    for layer, layer_bytes in layers.items():
        attention, mlp = _KINDS[layer]
        if attention not in state:
            share = divisions[layer].parameters if divisions else (1, 0) if "expert" not in layers else (0, 1)
            state[attention] = layer_bytes * share[0] // sum(share)
        state[mlp] = layer_bytes - state[attention]
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Dividing:
    """How a grid of whole layers is divided.

    Attributes:
        divisions: how layers' costs are divided; empty where nobody knows.
        inputs, targets: the grid's axes of lengths.
        weights: whether backward passes can be divided.
        sizes: samples of a micro-batch, where the grid has an axis of them: `[sizes, 1, 1]`.
        linear: whether the values hold what is linear in positions.
        inside: whether they hold attention's inside.
        seen: keys of a position of a sample of so many, in the mean, where it has no other's.
    """

    divisions: Mapping[LayerKind, Division]
    inputs: IntArray
    targets: IntArray
    weights: bool
    sizes: IntArray | int = 1
    linear: bool = True
    inside: bool = True
    seen: Callable[[Floats], Floats] = np.asarray

    def modules(self, layers: Layers) -> IntArray:
        """Costs of modules, from layers' costs: `[kinds, len(Quantity), …]`, `ABSENT` where the layer's are."""
        present = [layer for layer in _KINDS if (layer, Quantity.FORWARD) in layers]
        kinds = kinds_of(dict.fromkeys(present))
        shape = layers["encoder", Quantity.FORWARD].shape
        values = np.zeros((len(kinds), len(Quantity), *shape), np.int64)
        for layer in present:
            attention, mlp = (values[kinds.index(kind)] for kind in _KINDS[layer])
            if layer == "expert":
                self._experts(layers, attention, mlp)
            elif layer in self.divisions:
                self._divided(layers, layer, attention, mlp)
            else:
                whole = mlp if ("expert", Quantity.FORWARD) in layers else attention
                for quantity in (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED, Quantity.PEAK):
                    whole[quantity] = layers[layer, quantity]
            if (output := layers.get(("encoder_output", Quantity.STORED))) is not None and layer == "decoder":
                attention[Quantity.ENTRY_STORED] = attention[Quantity.ENTRY_PEAK] = output
                for entry in (Quantity.ENTRY_STORED, Quantity.ENTRY_PEAK):
                    mlp[entry] = _sum(mlp[entry], output)
        for (part, quantity), grid in layers.items():
            if part == "postprocess":
                values[kinds.index(HEAD), quantity] = grid
        return values

    def _divided(self, layers: Layers, layer: LayerKind, attention: IntArray, mlp: IntArray) -> None:
        division = self.divisions[layer]
        for quantity, rates in ((Quantity.FORWARD, division.forward), (Quantity.BACKWARD, division.backward)):
            attention[quantity] = _part(layers[layer, quantity], self._attention_share(layer, rates))
            mlp[quantity] = _difference(layers[layer, quantity], attention[quantity])
        if self.weights:
            weight = self._weight_times(layers, layer)
            attention[Quantity.WEIGHT] = _part(weight, self._attention_share(layer, division.forward, weights=True))
            mlp[Quantity.WEIGHT] = _difference(weight, attention[Quantity.WEIGHT])
        stored, peak = layers[layer, Quantity.STORED], layers[layer, Quantity.PEAK]
        attention[Quantity.STORED], besides = (
            _part(stored, self._attention_share(layer, rates)) for rates in division.stored
        )
        attention[Quantity.PEAK] = mlp[Quantity.ENTRY_PEAK] = peak
        mlp[Quantity.STORED] = _difference(stored, attention[Quantity.STORED])
        mlp[Quantity.ENTRY_STORED] = _difference(attention[Quantity.STORED], besides)
        if division.peak is None:
            return
        mlp[Quantity.ENTRY_PEAK] = self._at_most(peak, layer, division.peak[1])
        # In packed rows' own tables samples keep what else attention's inside does, and peaks do not add up.
        if (self.inside and self.linear) or not division.peak[0].inner:
            # What attention at a stage's end keeps is still held when the layer before it peaks in its backward.
            attention[Quantity.PEAK] = np.maximum(
                self._at_most(peak, layer, division.peak[0]), _difference(peak, mlp[Quantity.STORED])
            )
            mlp[Quantity.PEAK] = _difference(peak, attention[Quantity.STORED])

    def _at_most(self, peak: IntArray, layer: LayerKind, rates: Peak) -> IntArray:
        """The peak of one of a layer's modules by its rates, no higher than the layer's."""
        known = rates.once + self.sizes * self._attention(layer, rates) / PEAK_UNIT
        return np.minimum(peak, np.floor(known)).astype(np.int64)

    def _experts(self, layers: Layers, attention: IntArray, mlp: IntArray) -> None:
        """The costs of a layer with experts apart from its attention, which costs as in layers without."""
        for quantity in (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED, Quantity.PEAK):
            before = attention[Quantity.STORED if quantity is Quantity.PEAK else quantity]
            mlp[quantity] = _difference(layers["expert", quantity], before)
        mlp[Quantity.ENTRY_PEAK] = layers["expert", Quantity.PEAK]
        if not self.divisions:
            return
        division = self.divisions["expert"]
        if self.weights:
            weight = self._weight_times(layers, "expert")
            mlp[Quantity.WEIGHT] = _difference(weight, attention[Quantity.WEIGHT])
        besides = _part(layers["expert", Quantity.STORED], self._attention_share("expert", division.stored[1]))
        mlp[Quantity.ENTRY_STORED] = _difference(attention[Quantity.STORED], besides)

    def _attention(self, layer: LayerKind, rates: Rates | Peak, *, inside: bool = True) -> Floats:
        """The rates of attention, or of a peak, at every point: `[inputs, targets]`."""
        positions, keys, memory = self._positions(layer)
        inside = inside and self.inside
        return np.asarray(rates.linear * positions + rates.memory * memory + inside * rates.inner * positions * keys)

    def _attention_share(self, layer: LayerKind, rates: Rates, *, weights: bool = False) -> IntArray:
        """Attention's share at every point, in parts: `[inputs, targets]`; of weights, which its inside has none of."""
        positions, _, _ = self._positions(layer)
        if not self.linear and rates.inner and not weights:
            return np.full(positions.shape, _PARTS, np.int64)
        attention = self._attention(layer, rates, inside=not weights)
        return np.asarray(np.rint(attention / np.maximum(attention + rates.mlp * positions, 1) * _PARTS), np.int64)

    def _weight_times(self, layers: Layers, layer: LayerKind) -> IntArray:
        """What a layer's weight gradients take at every point, in ns; `ABSENT` where its forward is."""
        forward = layers[layer, Quantity.FORWARD]
        rates, known = self.divisions[layer].forward, self.divisions[layer].weights
        positions, keys, memory = self._positions(layer)
        if known is not None:
            once, linear, of_memory = known
            times = once + self.sizes * (linear * positions + of_memory * memory) / WEIGHT_UNIT
            return np.where(forward == ABSENT, ABSENT, np.rint(times).astype(np.int64))
        linears = positions * (rates.linear + rates.mlp) + rates.memory * memory
        inner = self.inside * rates.inner * positions * keys
        return _part(forward, np.asarray(np.rint(linears / np.maximum(linears + inner, 1) * _PARTS), np.int64))

    def _positions(self, layer: LayerKind) -> tuple[Floats, Floats, Floats]:
        """A layer's own positions, its keys', and the encoder's output's, at every point: `[inputs, targets]` each."""
        inputs, targets = np.broadcast_arrays(self.inputs[:, None].astype(float), self.targets.astype(float))
        return (targets, targets + inputs, inputs) if layer == "decoder" else (inputs, self.seen(inputs), 0 * inputs)


def _part(values: IntArray, share: IntArray) -> IntArray:
    """values · share, rounded; in steps, so that 2^42 · 2^20 does not overflow."""
    quotient, rest = np.divmod(values, _PARTS)
    return np.asarray(np.where(values == ABSENT, ABSENT, quotient * share + (rest * share + _PARTS // 2) // _PARTS))


def _difference(values: IntArray, less: IntArray) -> IntArray:
    absent = (values == ABSENT) | (less == ABSENT)
    return np.asarray(np.where(absent, ABSENT, np.maximum(values - less, 0)))


def _sum(values: IntArray, more: IntArray) -> IntArray:
    return np.asarray(np.where((values == ABSENT) | (more == ABSENT), ABSENT, values + more))
