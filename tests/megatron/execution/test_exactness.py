"""Layouts against one process: gradients of one iteration, losses, norms and weights of five, from the same weights.

The reference runs samples one by one, unpadded, without Megatron's schedules, reductions or optimizer. In each family
every two settings meet in some row.
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.helpers.layouts.compare import assert_trained_alike, deviation, gradients_of, of_the_largest, whole
from tests.helpers.layouts.layout import ALL, Layout, on_ranks, reference, table

LAYOUTS = (
    "gpt 1x1x1",
    "gpt 1x2x2, Megatron's attention, overlapped, one replica without samples *",
    "gpt 1x4x1, full",
    "gpt 1x2x1, layers 3+1",
    "gpt 1x3x1, layers 1+2+1, selective",
    "gpt 1x2x1, two chunks, overhead 0.5",
    "gpt 1x2x2, two chunks, distributed optimizer",
    "gpt 1x2x2, rotary positions, untied",
    "gpt 2x2x1, two chunks, sequence parallel, rotary positions, untied, recompute mixed",
    "gpt 4x1x2",
    "gpt 2x1x4, sequence parallel",
    "gpt 2x4x1, selective",
    "gpt 1x8x1, depth 8, recompute mixed",
    "gpt 1x8x1, layers 2+1+1+1+1+1+2+1",
    "gpt 1x5x1, two chunks, depth 10",
    "gpt 2x2x1, sequence parallel, recompute mixed, also of MLPs",
    "gpt 4x2x1, sequence parallel, full",
    "gpt 1x1x4, distributed optimizer",
    "t5 1x1x2, one replica without samples",
    "t5 1x2x2, overlapped, one replica without samples",
    "t5 1x3x1, layers 1+2+1",
    "t5 1x2x1, layers 2+1 *",
    "t5 1x4x1, layers 1+2+1+1",
    "t5 1x2x1, two chunks, recompute mixed, of MLPs *",
    "t5 2x2x2, two chunks, distributed optimizer",
    "t5 2x2x1, two chunks, sequence parallel, rotary positions, recompute mixed",
    "t5 2x1x2",
    "t5 2x2x2, relative positions, untied, recompute mixed",
    "t5 4x2x1, full",
    "t5 4x1x2",
    "t5 2x4x1, sequence parallel",
    "t5 4x2x1, sequence parallel",
    "t5 1x1x4, distributed optimizer",
    "t5 1x8x1, depth 8, recompute mixed",
    "t5 1x8x1, layers 1+1+2+1+1+2+1+1",
)
PACKED = (
    "gpt 1x1x1, packed",
    "gpt 1x1x1, rotary positions, recompute mixed, rows mixed",
    "gpt 2x2x1, two chunks, sequence parallel, rotary positions, recompute mixed, packed",
    "gpt 1x4x1, packed",
    "gpt 1x2x2, no positions, rows mixed, overhead 0",
    "gpt 2x2x2, rows mixed, overlapped, distributed optimizer",
    "t5 1x1x1, recompute mixed, packed",
    "t5 1x2x2, rotary positions, recompute mixed, rows mixed, overhead 0",
    "t5 1x2x1, relative positions, recompute mixed, packed *",
    "t5 1x4x1, two chunks, depth 8, packed",
    "t5 2x2x2, rows mixed, scatter-gather, distributed optimizer, overhead 50",
)
SLICED = (
    "gpt 1x1x1, slices of 16",
    "gpt 1x2x1, slices of 16, recompute mixed",
    "gpt 1x2x1, slices of 8, rotary positions, full",
    "gpt 2x2x1, two chunks, slices of 16, sequence parallel, rotary positions, recompute mixed",
    "gpt 1x2x2, slices of 24, recompute mixed, overlapped",
    "gpt 2x2x2, slices of 16, overlapped, distributed optimizer",
    "gpt 1x4x1, slices of 16, recompute mixed, rules of CUDA",
)
DIVIDED = (
    "gpt 2x2x1, two chunks, sequence parallel, rotary positions, recompute mixed, every second divided",
    "gpt 1x2x2, two chunks, divided, overlapped, distributed optimizer *",
    "gpt 1x2x2, every second divided, overlapped, one replica without samples",
    "gpt 2x2x1, divided",
    "t5 1x2x2, relative positions, divided, overhead 0",
    "t5 2x2x2, every second divided, overlapped, distributed optimizer",
)
HALVED = (
    "gpt 1x2x1, layers 2.5+1.5, recompute mixed",
    "gpt 2x2x1, layers 1.5+2.5, sequence parallel, rotary positions, untied, recompute mixed",
    "gpt 1x2x2, layers 2.5+1.5, overlapped, distributed optimizer",
    "gpt 1x2x1, layers 2.5+1.5, divided",
    "gpt 1x3x1, layers 1.5+2+0.5, full, packed",
    "gpt 1x2x1, layers 2.5+1.5, recompute mixed, also of MLPs",
    "gpt 1x2x2, layers 1.5+2.5, Megatron's attention, overlapped",
    "t5 1x2x1, layers 1.5+2.5, recompute mixed *",
    "t5 1x2x1, layers 2.5+1.5, recompute mixed, of MLPs",
    "t5 1x4x2, layers 1.5+0.5+0.5+1.5, relative positions, overlapped",
    "t5 2x2x1, layers 2.5+1.5, sequence parallel, recompute mixed, packed",
)
INTERLEAVED = (
    "gpt 1x2x1, two chunks, layers 1+1.5+0.5+1, slices of 16, every second divided, recompute mixed *",
    "gpt 2x2x1, two chunks, layers 0.5+1.5+1+1, slices of 16, sequence parallel, rotary positions, untied",
    "gpt 1x2x2, two chunks, layers 1.5+0.5+1.5+0.5, divided, overlapped, distributed optimizer",
    "gpt 1x3x1, two chunks, layers 0.5+1+0.5+1+0.5+0.5, slices of 24, divided",
    "t5 1x2x1, two chunks, layers 0.5+1+1+1.5, every second divided, recompute mixed *",
    "t5 1x2x2, two chunks, layers 1.5+1+0.5+1, relative positions, divided, overlapped, packed",
    "t5 2x2x1, two chunks, layers 1+0.5+1.5+1, sequence parallel, rotary positions, rows mixed, divided",
    "t5 2x2x2, two chunks, layers 1+1+1.5+0.5, untied, full, overlapped, distributed optimizer",
)
TARGETS = (
    "gpt 1x1x1, losses of targets, recompute mixed, also of MLPs",
    "gpt 1x2x1, losses of targets, untied, packed",
    "gpt 2x2x1, losses of targets, sequence parallel, rotary positions, recompute mixed, rows mixed *",
    "gpt 4x1x1, losses of targets, Megatron's attention",
    "gpt 1x2x2, losses of targets, layers 3.5+0.5, overlapped, every second divided *",
    "gpt 1x2x2, losses of targets, layers 4+0, overlapped",
    "gpt 1x2x1, losses of targets, layers 3.5+0.5, slices of 16, full *",
    "gpt 1x3x1, losses of targets, layers 1.5+2+0.5, recompute mixed, packed",
    "gpt 1x2x2, losses of targets, two chunks, layers 1+1.5+1+0.5, slices of 16, recompute mixed, divided, overlapped",
    "gpt 1x2x2, losses of targets, two chunks, overlapped, distributed optimizer, one replica without samples",
    "gpt 2x2x2, losses of targets, sequence parallel, overlapped, distributed optimizer",
    "gpt 1x1x4, losses of targets, overlapped, divided",
)
PATTERNS = (
    "gpt 1x2x1, pattern *-*--*, layers 3+3, every second divided, recompute mixed *",
    "gpt 1x2x1, pattern *-*-*-*-, two chunks, layers 3+1+2+2, rotary positions, rows mixed *",
    "gpt 1x2x1, pattern *-*-, layers 1+3, slices of 16, recompute mixed",
    "gpt 1x1x1, pattern *-*-, recompute mixed, also of MLPs",
    "gpt 2x2x1, pattern **--*-, sequence parallel, untied, recompute mixed, packed",
    "gpt 1x2x2, pattern -*-*, layers 2+2, Megatron's attention, overlapped, distributed optimizer",
    "gpt 1x3x1, pattern *-*-*, layers 2+1+2, full, divided",
    "gpt 1x2x2, pattern *-*-, layers 3+1, losses of targets, overlapped, every second divided",
    "gpt 1x2x1, pattern *-*, layers 1+2, losses of targets, slices of 16, full",
    "gpt 1x2x1, pattern *-*-, layers 4+0, losses of targets, packed",
)
TEAMS = (
    "gpt 1x1x2, teams 2, recompute mixed *",
    "gpt 1x1x4, teams 4, rows mixed, rotary positions, overlapped, distributed optimizer",
    "gpt 1x1x4, teams 2+1+1/4/1+1+2, Megatron's attention, overlapped, distributed optimizer *",
    "gpt 1x2x2, teams 2, packed, rotary positions, every second divided, recompute mixed",
    "gpt 2x2x2, teams 2, two chunks, sequence parallel, rotary positions, untied, recompute mixed, rows mixed",
    "gpt 1x1x8, teams 8/4+2+1+1, full",
    "gpt 1x1x4, teams 4, then teams 2+1+1, rows mixed, overlapped, distributed optimizer *",
    "gpt 1x2x4, teams 2+2, then teams 1+1+1+1, packed, every second divided, recompute mixed",
    "gpt 1x2x4, teams 2+2/4, losses of targets, overlapped, divided *",
    "gpt 1x1x4, teams 2+1+1, losses of targets, packed, distributed optimizer",
    "gpt 1x2x2, teams 2, pattern *-*--*, layers 3+3, rows mixed",
    "gpt 1x2x4, teams 4/2+1+1, selective, divided, rows mixed",
    "gpt 2x1x2, teams 2, losses of targets, sequence parallel, recompute mixed, packed, distributed optimizer",
)
HALF = (
    "gpt 1x2x1, divided, fp16",
    "gpt 1x2x1, every second divided, bf16",
    "gpt 1x2x1, slices of 16, recompute mixed, bf16",
    "gpt 1x2x1, slices of 16, fp16",
    "gpt 1x2x1, bf16 *",
    "gpt 1x2x1, losses of targets, recompute mixed, packed, bf16",
    "gpt 2x2x1, losses of targets, sequence parallel, fp16",
    "gpt 2x1x1, losses of targets, fused loss, rows mixed, bf16",
    "gpt 2x2x1, two chunks, recompute mixed, bf16",
    "gpt 1x2x2, distributed optimizer, fp16",
    "t5 1x2x2, distributed optimizer, bf16",
    "t5 2x2x1, recompute mixed, bf16",
    "gpt 1x2x1, recompute mixed, packed, bf16",
    "t5 1x2x1, rows mixed, bf16",
    "t5 1x2x1, packed, fp16",
    "t5 1x2x1, fp16",
)


@pytest.mark.parametrize(
    "layout", table(LAYOUTS + PACKED + SLICED + DIVIDED + HALVED + INTERLEAVED + TARGETS + PATTERNS + TEAMS)
)
def test_a_layout_trains_as_one_process_with_samples_one_by_one(layout):
    expected = reference(layout.model)
    results = on_ranks("trainer.train", layout)
    assert_trained_alike(results, expected)
    assert not any(overflowed for result in results for overflowed in result["overflowed"])
    if layout.targets:  # leaving positions out adds no more than rounding
        assert of_the_largest(gradients_of(results), gradients_of([expected])) <= 1e-6
        assert results[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    whole([result["weights"] for result in results], tolerance=0)  # copies are equal still, those of tied weights too
    counts = results[0]["micro_batches"]
    assert counts.count(0) == layout.idle
    if max(counts) > 1 and not layout.slices:  # pieces may all be alike
        assert len({tuple(shape) for shape in results[0]["shapes"]}) > 1, "micro-batches of varying shape"
    if layout.slices:
        assert results[0]["cut"] >= 3
    if layout.rows != "padded":
        assert any(results[0]["packed"]), "samples share a row"
        assert layout.rows == "packed" or not all(results[0]["packed"])
    if len(layout.recompute) > 1:
        assert set(results[0]["modes"]) == set(layout.recompute)


@pytest.mark.parametrize("layout", table(HALF))
def test_a_layout_in_half_precision_stays_within_its_noise(layout):
    """Twice as far from the fp32 reference, at most, as one process that gets the same samples in other orders.

    Losses are means over many tokens and their noise is small: for them one rounding of the type is allowed too.
    """
    gradients, losses = half_noise(layout.family, layout.dtype)
    rounding = torch.finfo(torch.bfloat16 if layout.dtype == "bf16" else torch.float16).eps
    actual = deviation(on_ranks("trainer.train", layout), reference(layout.model))
    assert actual[0] <= 2 * gradients
    assert actual[1] <= max(2 * losses, rounding)


@functools.cache
def half_noise(family: str, dtype: str) -> tuple[float, float]:
    alone = Layout(family=family, dtype=dtype, loss_scale=64.0 if dtype == "fp16" else None)
    orders = [replace(alone, samples=samples) for samples in (ALL, ALL[::-1])]
    deviations = [deviation(on_ranks("trainer.train", order), reference(alone.model)) for order in orders]
    noise = max(g for g, _ in deviations), max(losses for _, losses in deviations)
    assert noise[1] < 0.01, "one process trains"
    return noise
