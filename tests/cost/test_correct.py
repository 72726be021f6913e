"""Corrections learnt from measured passes, and grids written as files."""

import dataclasses

import numpy as np
import pytest

from megatron_dynapipe.cost import (
    ABSENT,
    PipelineLayout,
    Row,
    TableCostModel,
    packed_layer_costs,
)
from megatron_dynapipe.cost.correct import Correction, PassSample, corrected, fit_correction, fit_corrections
from megatron_dynapipe.cost.format import encode_file
from megatron_dynapipe.cost.pieces import prefix_of_row
from megatron_dynapipe.cost.tables import LayerTables
from megatron_dynapipe.cost.write import as_file
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import ModelFamily, Recompute, Shape, round_up
from tests.helpers.stage_costs import stage_costs
from tests.planning.planner_cases import cost_model

LAYOUT = PipelineLayout.equal(ModelFamily.T5, 4, 4, 2)
TRUTH = Correction(
    scales={Row.ENCODER_FORWARD: 1300, Row.DECODER_FORWARD: 900, Row.HEAD_FORWARD: 1500,
            Row.ENCODER_BACKWARD: 1100, Row.DECODER_BACKWARD: 2000, Row.HEAD_BACKWARD: 800},
    forward_offset_ns=50_000, backward_offset_ns=100_000,
)  # fmt: skip


MODEL = cost_model(ModelFamily.T5, max_size=32, max_length=512)
PREFIX = np.arange(10**6, 13 * 10**6, 10**6).reshape(4, 3)


def tables(family: ModelFamily = ModelFamily.T5) -> LayerTables:
    model = cost_model(family, max_size=32, max_length=512)
    return model.tables(tensor_parallel=1, recompute=Recompute.NONE)


def samples(grid: LayerTables, count: int, *, noise: float, seed: int = 0) -> list[PassSample]:
    draw, found = np.random.default_rng(seed), []
    for _ in range(count):
        shape = Shape(int(draw.integers(1, 16)), 8 * int(draw.integers(1, 40)), 8 * int(draw.integers(1, 20)))
        costs = stage_costs(grid, LAYOUT, *(np.array([n]) for n in shape))
        for stage in range(2):
            times = [int(ns[0, stage] * draw.lognormal(0, noise)) for ns in (costs.forward_ns, costs.backward_ns)]
            found.append(PassSample(stage=stage, shape=shape, recompute=Recompute.NONE, forward_ns=times[0],
                                    backward_ns=times[1]))  # fmt: skip
    return found


def packed_samples(grid: LayerTables, count: int) -> list[PassSample]:
    """Of rows: stage 0 has the four encoder layers, stage 1 the four of the decoder and the head."""
    draw, found = np.random.default_rng(1), []
    for _ in range(count):
        lengths = draw.integers(1, 300, int(draw.integers(2, 12))), draw.integers(2, 90, 12)
        inputs, targets = lengths[0], lengths[1][: len(lengths[0])]
        row = packed_layer_costs(grid, inputs, targets)
        assert row is not None
        shape = Shape(1, round_up(int(inputs.sum())), round_up(int(targets.sum())))
        decoder = [4 * row[way] for way in (Row.DECODER_FORWARD, Row.DECODER_BACKWARD)]
        times = (
            (4 * row[Row.ENCODER_FORWARD], 4 * row[Row.ENCODER_BACKWARD]),
            (decoder[0] + row[Row.HEAD_FORWARD], decoder[1] + row[Row.HEAD_BACKWARD]),
        )
        for stage, (forward, backward) in enumerate(times):
            found.append(PassSample(stage=stage, shape=shape, recompute=Recompute.NONE, forward_ns=int(forward),
                                    backward_ns=int(backward), inputs=tuple(inputs.tolist()),
                                    targets=tuple(targets.tolist())))  # fmt: skip
    return found


def near(learnt: LayerTables, truth: LayerTables, *shapes: Shape) -> None:
    """Times of stages within 6%, memory as it was."""
    for shape in shapes:
        query = [np.array([n]) for n in shape]
        expected, got = stage_costs(truth, LAYOUT, *query), stage_costs(learnt, LAYOUT, *query)
        assert got.forward_ns == pytest.approx(expected.forward_ns, rel=0.06)
        assert got.backward_ns == pytest.approx(expected.backward_ns, rel=0.06)
        assert (got.stored_bytes == expected.stored_bytes).all()


def test_a_wrong_start_heals() -> None:
    """By padded passes; by packed rows, the grid that their costs are derived from."""
    base = tables()
    truth = corrected(base, TRUTH)
    learnt = corrected(base, fit_correction(samples(truth, 60, noise=0.05), {Recompute.NONE: base}, LAYOUT))
    near(learnt, truth, Shape(5, 160, 64), Shape(1, 300, 100), Shape(12, 40, 24))
    base = dataclasses.replace(base, packed=None)
    truth = corrected(base, TRUTH)
    learnt = corrected(base, fit_correction(packed_samples(truth, 60), {Recompute.NONE: base}, LAYOUT))
    near(learnt, truth, Shape(5, 160, 64))


def test_either_layout_is_corrected_by_its_own_passes() -> None:
    base = tables()
    slower = dataclasses.replace(TRUTH, scales={row: 2 * scale for row, scale in TRUTH.scales.items()})
    truth = corrected(base, TRUTH, slower)
    found = [*samples(truth, 40, noise=0.02), *packed_samples(truth, 60)]
    learnt, again = (corrected(base, *fit_corrections(found, {Recompute.NONE: base}, LAYOUT)) for _ in range(2))
    assert (learnt.values == again.values).all(), "the same passes make the same correction"
    near(learnt, truth, Shape(5, 160, 64))
    row = np.array([100, 7, 230]), np.array([20, 60, 9])
    wanted, costs = packed_layer_costs(truth, *row), packed_layer_costs(learnt, *row)
    for way in ("FORWARD", "BACKWARD"):
        encoder, decoder, head = (Row[f"{kind}_{way}"] for kind in ("ENCODER", "DECODER", "HEAD"))
        assert costs[encoder] == pytest.approx(wanted[encoder], rel=0.06)
        assert 4 * costs[decoder] + costs[head] == pytest.approx(4 * wanted[decoder] + wanted[head], rel=0.06)
    memory = [Row.ENCODER_STORED, Row.DECODER_PEAK, Row.ENCODED_STORED]
    assert costs[memory].tolist() == wanted[memory].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_passes_of_nearly_one_size_are_scaled_not_shifted(seed: int) -> None:
    base = tables()
    draw = np.random.default_rng(seed)
    found = []
    for size in range(7, 10):
        shape = Shape(size, 160, 64)
        costs = stage_costs(base, LAYOUT, *(np.array([n]) for n in shape))
        for stage in range(2):
            for _ in range(8):  # now and then twice as long, on a machine with other work
                forward, backward = (
                    int(ns[0, stage] * draw.lognormal(0.4, 0.5)) for ns in (costs.forward_ns, costs.backward_ns)
                )
                found.append(PassSample(stage=stage, shape=shape, recompute=Recompute.NONE, forward_ns=forward,
                                        backward_ns=backward))  # fmt: skip
    correction = fit_correction(found, {Recompute.NONE: base}, LAYOUT)
    least = min(sample.forward_ns for sample in found) / 4
    assert max(correction.forward_offset_ns, correction.backward_offset_ns) < 0.25 * least


def test_a_few_stalled_passes_do_not_count() -> None:
    base = tables()
    found = samples(base, 40, noise=0.01)
    stalled = [PassSample(stage=s.stage, shape=s.shape, recompute=s.recompute, forward_ns=20 * s.forward_ns,
                          backward_ns=s.backward_ns) for s in found[:6]]  # fmt: skip
    correction = fit_correction(found[6:] + stalled, {Recompute.NONE: base}, LAYOUT)
    assert correction.scales[Row.ENCODER_FORWARD] == pytest.approx(1000, abs=120)


def test_a_correction_is_applied_in_integers_and_leaves_holes() -> None:
    grid = tables()
    values = grid.values.copy()
    values[:, -1, -1, -1] = ABSENT
    holed = LayerTables(sizes=grid.sizes, inputs=grid.inputs, targets=grid.targets, values=values, state=grid.state)
    result = corrected(holed, TRUTH).values
    assert (result[:, -1, -1, -1] == ABSENT).all()
    before = int(values[Row.ENCODER_FORWARD, 0, 0, 0])
    assert result[Row.ENCODER_FORWARD, 0, 0, 0] == (before * 1300 + 500) // 1000 + 50_000


def test_what_is_recomputed_in_full_stays_whole_under_a_correction() -> None:
    grid = MODEL.tables(tensor_parallel=1, recompute=Recompute.FULL)
    values = grid.values.copy()
    values[:, -1, -1, -1] = ABSENT
    assert (corrected(dataclasses.replace(grid, values=values), TRUTH).values[Row.ENCODER_WEIGHT] <= 0).all()


@pytest.mark.parametrize("family", list(ModelFamily))
def test_a_grid_reads_back_from_its_file_exactly(family: ModelFamily) -> None:
    grid = tables(family)
    assert grid.packed is not None
    if family is ModelFamily.GPT:
        grid = dataclasses.replace(grid, packed=dataclasses.replace(grid.packed, prefix=PREFIX))
    grid = corrected(grid, TRUTH)
    file = as_file({(1, Recompute.NONE): grid}, family, name="n", source="s", device="d", model=MODEL.model,
                   provenance={"version": 1})  # fmt: skip
    back = TableCostModel.decode(encode_file(file)).tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert (back.values == grid.values).all()
    assert back.state == dataclasses.replace(grid.state, ends=None, gradient_bytes=2), (
        "files know nothing outside layers"
    )
    assert back.sizes.tolist() == grid.sizes.tolist() and back.targets.tolist() == grid.targets.tolist()
    assert back.key_value_channels == grid.key_value_channels == 128 and back.division == grid.division
    assert grid.packed is not None and back.packed is not None
    assert (back.packed.prefix is None) == (family is ModelFamily.T5)
    if back.packed.prefix is not None:
        assert back.packed.prefix.tolist() == grid.packed.prefix.tolist() != PREFIX.tolist()
    for name in ("row_inputs", "row_targets", "linear", "inputs", "targets", "attention"):
        assert getattr(back.packed, name).tolist() == getattr(grid.packed, name).tolist(), name


@pytest.mark.parametrize(("split", "told"), [((1.5, 2, 0.5), True), ((2.5, 1.5), False)])
def test_a_wrong_division_of_layers_is_corrected_where_passes_tell(split: tuple[float, ...], told: bool) -> None:
    """Attention takes three times as much of a layer, against its MLP, as costs say.

    Of two stages, one has the attention more and the other the head: what is wrong goes to both. What stages take is
    right in any case.
    """
    base = tables(ModelFamily.GPT)
    odds = {Row.ENCODER_FORWARD: 3000, Row.ENCODER_BACKWARD: 3000}
    truth = corrected(base, dataclasses.replace(TRUTH, forward_offset_ns=0, backward_offset_ns=0, odds=odds))
    layout = PipelineLayout(family=ModelFamily.GPT, encoder_layers=4, decoder_layers=0, layers_per_stage=split)
    draw, found = np.random.default_rng(2), []
    for _ in range(80):
        shape = Shape(int(draw.integers(1, 16)), 8 * int(draw.integers(1, 40)), 0)
        costs = stage_costs(truth, layout, *(np.array([n]) for n in shape))
        for stage in range(len(split)):
            times = [int(ns[0, stage] * draw.lognormal(0, 0.02)) for ns in (costs.forward_ns, costs.backward_ns)]
            found.append(PassSample(stage=stage, shape=shape, recompute=Recompute.NONE, forward_ns=times[0],
                                    backward_ns=times[1]))  # fmt: skip
    learnt = corrected(base, fit_correction(found, {Recompute.NONE: base}, layout))
    query = np.array([5]), np.array([160]), np.array([0])
    for way in ("FORWARD", "BACKWARD"):
        shares = [
            float(each.values[Row[f"ENCODER_ATTENTION_{way}"]].sum() / each.values[Row[f"ENCODER_{way}"]].sum())
            for each in (base, learnt, truth)
        ]
        left = (shares[2] - shares[1]) / (shares[2] - shares[0])
        assert abs(left) < 0.25 if told else 0.5 < left < 1, f"of the error of a share {left:.2f} is left"
    expected, got = stage_costs(truth, layout, *query), stage_costs(learnt, layout, *query)
    assert got.forward_ns == pytest.approx(expected.forward_ns, rel=0.05)
    assert got.backward_ns == pytest.approx(expected.backward_ns, rel=0.05)
    packed = [packed_layer_costs(each, np.array([160, 40]), np.array([0, 0])) for each in (learnt, truth)]
    row = Row.ENCODER_ATTENTION_FORWARD
    assert not told or packed[0][row] == pytest.approx(packed[1][row], rel=0.1)


def test_passes_that_do_not_belong_to_the_run_are_refused() -> None:
    base, sample = tables(), PassSample(stage=0, shape=Shape(1, 8, 8), recompute=Recompute.FULL, forward_ns=1,
                                        backward_ns=1)  # fmt: skip
    with pytest.raises(CostModelError, match=r"under recompute .*full.*, which the model does not have"):
        fit_correction([sample], {Recompute.NONE: base}, LAYOUT)
    far = PassSample(stage=5, shape=Shape(1, 8, 8), recompute=Recompute.NONE, forward_ns=1, backward_ns=1)
    with pytest.raises(CostModelError, match="expected passes of 2 virtual stages"):
        fit_correction([far], {Recompute.NONE: base}, LAYOUT)
    with pytest.raises(CostModelError, match="no pass was measured"):
        fit_correction([], {Recompute.NONE: base}, LAYOUT)


def test_passes_with_pieces_are_charged_with_their_prefix() -> None:
    grid, layout = tables(ModelFamily.GPT), PipelineLayout.equal(ModelFamily.GPT, 4, 0, 2)
    own = np.array([200, 16])
    row = packed_layer_costs(grid, own, np.zeros(2, np.int64))
    assert row is not None
    row[:4] += prefix_of_row(grid, own, np.array([120, 0]))
    measured = [
        PassSample(stage=0, shape=Shape(1, 216, 0), recompute=Recompute.NONE, forward_ns=int(2 * row[0]) * 3 // 2,
                   backward_ns=int(2 * row[1]) * 3 // 2, inputs=(200, 16), targets=(0, 0), before=(120, 0))
    ] * 30  # fmt: skip
    found = fit_correction(measured, {Recompute.NONE: grid}, layout)
    assert found.scales[Row.ENCODER_FORWARD] == pytest.approx(1500, abs=3)
    assert found.scales[Row.ENCODER_BACKWARD] == pytest.approx(1500, abs=3)
