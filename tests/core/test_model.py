"""From layers to stages: sums, the head on the last stage, peaks, model state, boundaries, links."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from megatron_dynapipe.core.costs import ATTENTION, DECODER_ATTENTION, DECODER_MLP, EXPERT_MLP, HEAD, MLP
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import (
    LARGEST_COST,
    CostTables,
    Kind,
    Model,
    ModelState,
    PipelineLayout,
    Quantity,
    even_layer_split,
    model_of_layers,
    parse_layer_split,
    stage_modules,
)
from megatron_dynapipe.costing.state import model_state_bytes
from tests.helpers.stage_costs import grid_values, stage_costs

ONE = np.array([1], np.int64)
EIGHT = np.array([8], np.int64)
KINDS = (ATTENTION, MLP, DECODER_ATTENTION, DECODER_MLP, HEAD)
STORED, PEAK = Quantity.STORED, Quantity.PEAK
COSTS = {
    ATTENTION: (4, 8, 1, 7, 0),
    MLP: (6, 12, 2, 0, 1),
    DECODER_ATTENTION: (60, 120, 3, 4, 6),
    DECODER_MLP: (40, 80, 2, 0, 4),
    HEAD: (1000, 2000, 0, 0, 0),
}
"""Forward, backward, stored, peak and weight; layers of 10, 20, 3, 7 and of 100, 200, 5, 4."""
ENTRIES = {(MLP, Quantity.ENTRY_PEAK): 6, (DECODER_MLP, Quantity.ENTRY_PEAK): 2}


def flat(changes: Mapping[tuple[Kind, Quantity], int] = MappingProxyType({})) -> CostTables:
    """The same costs at every point."""
    costs = {(kind, Quantity(at)): cost for kind, five in COSTS.items() for at, cost in enumerate(five)}
    values = grid_values(KINDS, costs | ENTRIES | dict(changes), 1, 1, 1)
    modules = {ATTENTION: 4, MLP: 6, DECODER_ATTENTION: 40, DECODER_MLP: 60}
    state = ModelState(embedding_bytes=1000, modules=modules)
    return CostTables(kinds=KINDS, sizes=ONE, inputs=EIGHT, targets=EIGHT, values=values, state=state)


def t5(*split: float, chunks: int = 1, encoder: int = 3) -> PipelineLayout:
    model = model_of_layers(ModelFamily.T5, encoder, round(sum(split)) - encoder)
    return PipelineLayout.of_layers(model, split, chunks)


@pytest.mark.parametrize(
    ("changes", "stored", "peak"),
    [
        # [3 + 7, max(7, 3 + 4), stored 10 > 5 + 4]: a forward never peaks below what it keeps.
        pytest.param({}, [6, 8, 10], [10, 8, 10], id="the largest over the layers"),
        pytest.param({(HEAD, STORED): 9, (HEAD, PEAK): 30}, [6, 8, 19], [10, 8, 10 + 30], id="the head's above"),
        pytest.param({(HEAD, STORED): 9, (HEAD, PEAK): 2}, [6, 8, 19], [10, 8, 19], id="not below what is kept"),
        # Not the stage that makes it, which keeps it as its last encoder layer's.
        pytest.param(
            {(DECODER_ATTENTION, Quantity.ENTRY_STORED): 50},
            [6, 8, 60],
            [10, 8, 60],
            id="a decoder's stage keeps the encoder's output",
        ),
    ],
)
def test_memory_of_stages(changes: dict[tuple[Kind, Quantity], int], stored: list[int], peak: list[int]) -> None:
    costs = stage_costs(flat(changes), t5(2, 2, 2), ONE, EIGHT, EIGHT)
    assert (costs.stored_bytes.tolist(), costs.peak_bytes.tolist()) == ([stored], [peak])


def test_cuts_within_layers() -> None:
    """3 + 3 layers; the first stage peaks in the attention it ends with."""
    layout = t5(2.5, 1, 2.5)
    assert layout.modules == (ATTENTION, MLP) * 3 + (DECODER_ATTENTION, DECODER_MLP) * 3 + (HEAD,)
    assert layout.cuts.tolist() == [5, 7]
    assert layout.counts(KINDS).tolist() == [[3, 2, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 2, 3, 1]]
    costs = stage_costs(flat(), layout, ONE, EIGHT, EIGHT)
    assert costs.forward_ns.tolist() == [[20 + 4, 6 + 60, 40 + 200 + 1000]]
    assert costs.backward_ns.tolist() == [[40 + 8, 12 + 120, 80 + 400 + 2000]]
    assert costs.stored_bytes.tolist() == [[6 + 1, 2 + 3, 2 + 10]]
    assert costs.peak_bytes.tolist() == [[6 + 7, max(6, 2 + 4), max(2, 2 + 5 + 4, 2 + 10)]]
    recomputed = flat({(MLP, Quantity.ENTRY_STORED): 1, (MLP, Quantity.STORED): 0})  # an MLP keeps its input where
    costs = stage_costs(recomputed, layout, ONE, EIGHT, EIGHT)  # no attention before it does
    assert costs.stored_bytes.tolist() == [[3, 1 + 3, 2 + 10]]
    assert costs.peak_bytes.tolist() == [[2 + 7, 6, 12]]
    state = model_state_bytes(layout, flat().state, data_parallel=1, distributed_optimizer=False)
    assert state.tolist() == [8 * (20 + 4 + 1000), 8 * (6 + 40 + 1000), 8 * (60 + 200)]
    stages = stage_modules(layout)
    assert [stage.ends_encoder for stage in stages] == [False, True, False]
    assert [stage.starts_decoder for stage in stages] == [False, True, False]
    assert layout.decoder_state_forward == (False, True)


def test_model_state() -> None:
    """Parameters ×8, the optimizer's share of six divided over the replicas, embeddings where their stacks begin."""
    plain = model_state_bytes(t5(2, 2, 2), flat().state, data_parallel=2, distributed_optimizer=False)
    shared = model_state_bytes(t5(2, 2, 2), flat().state, data_parallel=2, distributed_optimizer=True)
    parameters = np.array([20 + 1000, 10 + 100 + 1000, 200])
    assert plain.tolist() == (8 * parameters).tolist()
    assert shared.tolist() == (5 * parameters).tolist()
    chunked = t5(1, 2, 2, 1, chunks=2)  # two of whose stages share a rank
    state = model_state_bytes(chunked, flat().state, data_parallel=1, distributed_optimizer=False)
    assert state.tolist() == [8 * (10 + 1000 + 200 + 1000), 8 * (20 + 100)]


FOUR = model_of_layers(ModelFamily.GPT, 4)
HYBRID = Model(encoder=(ATTENTION, MLP, EXPERT_MLP), modules_per_layer=1)


@pytest.mark.parametrize(
    ("model", "split", "chunks", "message"),
    [
        (FOUR, (2, 3), 1, r"layer split of 4 layers .* got \[2, 3\] of 5"),
        (FOUR, (5, -1), 1, "at least 0 on every stage"),
        (model_of_layers(ModelFamily.T5, 4, 2), (6, 0), 1, "at least 0.5 on every stage"),
        (FOUR, (1.25, 2.75), 1, "in multiples of 0.5"),
        (FOUR, (2, 1, 1), 2, "3 virtual stages cannot be assigned to pipeline stages 2 each"),
        (HYBRID, (1.5, 1.5), 1, r"layer split of 3 layers in multiples of 1, got \[1.5, 1.5\]"),
    ],
)
def test_refuses_impossible_layouts(model: Model, split: tuple[float, ...], chunks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineLayout.of_layers(model, split, chunks)


@pytest.mark.parametrize(
    ("model", "split", "modules", "cuts_layers"),
    [
        (FOUR, (2, 2), (4, 4), False),
        (FOUR, (2.5, 1.5), (5, 3), True),
        (HYBRID, (2, 1), (2, 1), True),
        (Model(encoder=("block", "block"), modules_per_layer=1), (1, 1), (1, 1), False),
        (model_of_layers(ModelFamily.T5, 1, 2), (1.5, 1.5), (3, 3), True),
    ],
)
def test_layers_are_modules_and_back(
    model: Model, split: tuple[float, ...], modules: tuple[int, ...], cuts_layers: bool
) -> None:
    layout = PipelineLayout.of_layers(model, split)
    assert (layout.modules_per_stage, layout.layers_per_stage) == (modules, split)
    assert layout.cuts_layers is cuts_layers


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [(4, 2, (2, 2)), (7, 3, (3, 2, 2)), (3, 1, (3,)), (3, 4, (1, 1, 0.5, 0.5)), (2, 4, (0.5, 0.5, 0.5, 0.5))],
)
def test_an_even_split(layers: int, stages: int, split: tuple[float, ...]) -> None:
    assert even_layer_split(layers, stages, halves=True) == split
    with pytest.raises(ConfigError, match=f"{layers} layers cannot be split over {layers + 1} stages"):
        even_layer_split(layers, layers + 1)
    with pytest.raises(ConfigError, match=f"{layers} layers cannot be split over {2 * layers + 1} stages"):
        even_layer_split(layers, 2 * layers + 1, halves=True)


def test_a_split_is_numbers_of_layers() -> None:
    assert parse_layer_split("9,8, 8,7", expected="") == (9, 8, 8, 7)
    halves = parse_layer_split("9.5,8.0, 7.50", expected="")
    assert halves == (9.5, 8, 7.5) and isinstance(halves[1], int)
    for text in ("", "9,", "9,-1", "9.25", "auto"):
        with pytest.raises(ConfigError, match="expected numbers, got"):
            parse_layer_split(text, expected="numbers")


@pytest.mark.parametrize("row", [Quantity.FORWARD, Quantity.STORED, Quantity.PEAK])
def test_a_stage_above_the_limit_makes_the_micro_batch_infeasible(row: Quantity) -> None:
    tables = flat({(ATTENTION, row): LARGEST_COST // 2 - 9})
    assert stage_costs(tables, t5(2, 4), ONE, EIGHT, EIGHT).feasible.tolist() == [True]
    assert stage_costs(tables, t5(3, 3), ONE, EIGHT, EIGHT).feasible.tolist() == [row is Quantity.PEAK]


def test_an_equal_split_must_divide() -> None:
    assert PipelineLayout.equal(model_of_layers(ModelFamily.GPT, 6), 3).layers_per_stage == (2, 2, 2)
    with pytest.raises(ConfigError, match="5 layers cannot be split equally over 2"):
        PipelineLayout.equal(model_of_layers(ModelFamily.GPT, 5), 2)
