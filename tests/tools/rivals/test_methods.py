"""Methods held against one another: what each pads and packs to, and what a prediction counts."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel
from megatron_dynapipe.tools.rivals.methods import (
    METHODS,
    TRAINERS,
    Longest,
    method_settings,
    predict,
    predict_fastest,
    rows_of_longest,
)
from megatron_dynapipe.tools.rivals.pipelines import by_hand
from tests.core.planner_cases import batch_of, cost_model, settings


def model(family: ModelFamily) -> tuple[PlannerSettings, AnalyticCostModel]:
    run = settings(family, hidden_size=64, memory_limit_bytes=10**9, micro_batch_layouts=tuple(BatchLayout))
    return run, cost_model(family, hidden=64, vocabulary=512, rates=A100_RATES, max_size=64, max_length=1024)


@pytest.mark.parametrize(
    ("family", "tokens", "longest"),
    [
        (ModelFamily.GPT, (513, 0), (512, 0)),
        (ModelFamily.GPT, (514, 0), (520, 0)),
        (ModelFamily.T5, (512, 62), (512, 64)),
        (ModelFamily.T5, (505, 63), (512, 72)),
    ],
)
def test_longest_positions(family: ModelFamily, tokens: tuple[int, int], longest: tuple[int, int]) -> None:
    assert Longest.of_tokens(family, *tokens) == longest


@pytest.mark.parametrize(
    ("family", "samples", "rows", "row"),
    [
        (ModelFamily.GPT, [(41, 0), (25, 0), (17, 0)], 2, (65, 0)),  # 40 + 24, 16
        (ModelFamily.T5, [(40, 4), (24, 4), (16, 4)], 2, (64, 14)),
        (ModelFamily.T5, [(8, 14), (8, 14), (8, 6), (8, 6)], 3, (64, 14)),  # targets fill the rows
    ],
)
def test_rows_without_masks_are_of_the_longest_length(family, samples, rows, row):
    longest = Longest(64, 0 if family is ModelFamily.GPT else 16)
    packed = rows_of_longest(batch_of(*samples), longest, family)
    found = list(zip(packed.input_lengths.tolist(), packed.target_lengths.tolist(), strict=True))
    assert found == [row] * rows
    assert Longest.of_tokens(family, *row) == longest


@pytest.mark.parametrize("family", list(ModelFamily))
def test_every_method_predicts_the_same_tokens(family: ModelFamily) -> None:
    run, costs = model(family)
    samples = [(n, 0 if family is ModelFamily.GPT else 1 + n // 9) for n in (9, 17, 33, 120, 64, 200, 31, 5)]
    tokens = sum(map(sum, samples))
    longest = Longest.of_tokens(family, 256, 0 if family is ModelFamily.GPT else 64)
    found = {name: predict(name, batch_of(*samples), longest, run, costs) for name in METHODS}
    for each in found.values():
        assert each.tokens_per_second * each.ms / 1e3 == pytest.approx(tokens)
        assert 0 < each.padding_efficiency <= 1 and 1 <= each.shapes <= each.micro_batches
    assert found["padding"].padding_efficiency == pytest.approx(tokens / (len(samples) * sum(longest)))
    assert found["dynapipe"].ms <= min(each.ms for each in found.values()) * 1.001
    for name in TRAINERS:
        pipelines = by_hand(run, costs, batch_of(*samples))
        assert predict_fastest(name, batch_of(*samples), longest, pipelines, costs).ms <= found[name].ms
    assert method_settings("padding", longest, run).micro_batch_layouts == (BatchLayout.PADDED,)
    assert method_settings("packed_rows", longest, run).schedule.method == "1f1b"


def test_pipelines_by_hand() -> None:
    """Equal layers, and whole layers by work, of which the head may leave the last stage none."""
    run = settings(ModelFamily.GPT, encoder_layers=8, pipeline_parallel=2)
    heavy = cost_model(ModelFamily.GPT, vocabulary=2**15)
    batch = batch_of((400, 0), (300, 0))
    found = [(one.chunks, one.layout.layers_per_stage) for one in by_hand(run, heavy, batch)]
    labelled = replace(batch, labels=np.array([4, 3], np.int32))  # which others run all the same
    assert found == [(one.chunks, one.layout.layers_per_stage) for one in by_hand(run, heavy, labelled)]
    assert [chunks for chunks, _ in found] == [1, 1, 2, 2, 4, 4]
    assert [split for _, split in found[::2]] == [(4, 4), (2,) * 4, (1,) * 8]
    assert all(sum(split) == 8 and split[-1] < split[0] for _, split in found[1::2])
    assert found[-1][1][-1] == 0
