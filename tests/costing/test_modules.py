"""Modules' costs from those of layers: weight gradients, as they were measured or as the forward has them."""

import numpy as np
import pytest

from megatron_dynapipe.core.costs import ABSENT, WEIGHT_UNIT, Division, Quantity, Rates, WeightTime
from megatron_dynapipe.costing.modules import Dividing, Part

SIZES, LENGTHS = np.array([1, 4]), np.array([16, 64])
MEASURED = (500, 30 * WEIGHT_UNIT, 7 * WEIGHT_UNIT)


def weights(forward: object, layer: Part = "encoder", *, known: WeightTime | None, inside: bool = True) -> np.ndarray:
    """ns of weight gradients of (attention, MLP), `[2, sizes, inputs, targets]`, by layers with this forward."""
    rates = Rates(1, 1, 3, 2)
    division = Division(forward=rates, backward=rates, stored=(rates, rates), parameters=(1, 1), weights=known)
    targets = LENGTHS if layer == "decoder" else np.zeros(1, np.int64)
    grid = np.broadcast_to(np.asarray(forward, np.int64), (len(SIZES), len(LENGTHS), len(targets)))
    dividing = Dividing(
        divisions={"encoder": division, "decoder": division, "expert": division},
        inputs=LENGTHS,
        targets=targets,
        weights=True,
        sizes=SIZES[:, None, None],
        inside=inside,
    )
    kinds: tuple[Part, ...] = ("encoder",) if layer == "encoder" else ("encoder", layer)
    quantities = (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED, Quantity.PEAK)
    made = dividing.modules({(kind, quantity): grid for kind in kinds for quantity in quantities})
    at = {"encoder": (0, 1), "decoder": (2, 3), "expert": (0, 2)}[layer]  # as `kinds_of` orders them
    return made[list(at), Quantity.WEIGHT]


@pytest.mark.parametrize("layer", ["encoder", "decoder", "expert"])
def test_measured_weight_gradients_take_what_their_positions_do_whatever_the_forward(layer):
    b, s = SIZES[:, None, None], LENGTHS[None, :, None]
    own, memory = (LENGTHS[None, None, :], s) if layer == "decoder" else (s, 0 * s)
    expected = np.broadcast_to(500 + b * (30 * own + 7 * memory), (2, 2, len(LENGTHS) if layer == "decoder" else 1))
    for forward in (10**6, 10**9):
        found = weights(forward, layer, known=MEASURED)
        assert found.sum(axis=0).tolist() == expected.tolist()
        assert (found > 0).all(), "both halves have their part"


def test_without_a_measurement_they_take_the_forward_but_attentions_inside():
    keys = LENGTHS[:, None]
    found = weights(10**6, known=None).sum(axis=0)
    assert found == pytest.approx(np.broadcast_to(10**6 * (1 + 3) / (1 + 3 + keys), found.shape), abs=2)
    rows = weights(10**6, known=None, inside=False)
    assert (rows.sum(axis=0) == 10**6).all() and (rows[0] == 250_000).all()


@pytest.mark.parametrize("known", [None, MEASURED])
def test_what_does_not_fit_has_none(known):
    assert (weights(ABSENT, known=known) == ABSENT).all()
