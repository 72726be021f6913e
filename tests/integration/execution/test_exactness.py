"""Layouts against one process: gradients of one iteration, losses, norms and weights of five, from the same weights.

The reference runs samples one by one, unpadded, without Megatron's schedules, reductions or optimizer.
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.helpers.layouts.compare import assert_close, deviation, gradients_of, whole
from tests.helpers.layouts.layout import ALL, MIXED, Layout, on_ranks, reference, table

LAYOUTS = {
    # model x tensor x stages x replicas, then what else; a * marks the core that runs every day
    "gpt 1x1x1": Layout(family="gpt"),
    "gpt 1x1x1, recompute mixed": Layout(family="gpt", recompute=MIXED),
    "gpt 1x2x1, recompute mixed": Layout(family="gpt", stages=2, recompute=MIXED),
    "gpt 1x2x2": Layout(family="gpt", stages=2, replicas=2, layer_overhead_us=0.0),
    "gpt 1x1x2, overlapped": Layout(family="gpt", replicas=2, overlap=True),
    "gpt 1x2x2, overlapped, Megatron's attention, one replica without samples *": Layout(
        family="gpt", stages=2, replicas=2, overlap=True, attention="megatron", idle=1
    ),
    "gpt 1x4x1, full": Layout(family="gpt", stages=4, recompute=("full",)),
    "gpt 1x2x1, layers 3+1": Layout(family="gpt", stages=2, split=(3, 1)),
    "gpt 1x3x1, layers 1+2+1, selective": Layout(family="gpt", stages=3, split=(1, 2, 1), recompute=("selective",)),
    "gpt 1x2x1, two chunks, odd": Layout(family="gpt", stages=2, chunks=2, layer_overhead_us=0.5),
    "gpt 1x2x1, two chunks, recompute mixed": Layout(family="gpt", stages=2, chunks=2, recompute=MIXED),
    "gpt 1x2x2, two chunks, overlapped": Layout(family="gpt", stages=2, chunks=2, replicas=2, overlap=True),
    "gpt 1x2x2, two chunks, distributed optimizer *": Layout(
        family="gpt", stages=2, chunks=2, replicas=2, distributed_optimizer=True
    ),
    "gpt 2x1x1": Layout(family="gpt", tensor=2),
    "gpt 2x2x1, recompute mixed": Layout(family="gpt", tensor=2, stages=2, recompute=MIXED),
    "gpt 2x2x2": Layout(family="gpt", tensor=2, stages=2, replicas=2),
    "gpt 2x2x1, two chunks": Layout(family="gpt", tensor=2, stages=2, chunks=2),
    "gpt 2x2x2, distributed optimizer, overlapped": Layout(
        family="gpt", tensor=2, stages=2, replicas=2, distributed_optimizer=True, overlap=True
    ),
    "gpt 1x2x2, rotary positions, untied": Layout(family="gpt", stages=2, replicas=2, positions="rope", tied=False),
    "gpt 2x2x1, two chunks, sequence parallel, rotary positions, untied": Layout(
        family="gpt", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", tied=False, recompute=MIXED
    ),
    "gpt 4x2x1": Layout(family="gpt", tensor=4, stages=2),
    "gpt 4x1x1, Megatron's attention": Layout(family="gpt", tensor=4, attention="megatron"),
    "gpt 4x1x2": Layout(family="gpt", tensor=4, replicas=2),
    "gpt 2x1x4, sequence parallel": Layout(family="gpt", tensor=2, replicas=4, sequence=True),
    "gpt 2x4x1, selective": Layout(family="gpt", tensor=2, stages=4, recompute=("selective",)),
    "gpt 1x2x3": Layout(family="gpt", stages=2, replicas=3, layer_overhead_us=0.0),
    "gpt 1x2x4": Layout(family="gpt", stages=2, replicas=4, layer_overhead_us=0.0),
    "gpt 1x8x1, recompute mixed": Layout(family="gpt", depth=8, stages=8, recompute=MIXED),
    "gpt 1x8x1, layers 2+1+1+1+1+1+2+1": Layout(family="gpt", depth=10, stages=8, split=(2, 1, 1, 1, 1, 1, 2, 1)),
    "gpt 1x5x1, two chunks": Layout(family="gpt", depth=10, stages=5, chunks=2),
    "gpt 2x2x1, sequence parallel, recompute mixed, also of MLPs *": Layout(
        family="gpt", tensor=2, stages=2, sequence=True, recompute=MIXED, modules=("core_attn", "mlp")
    ),
    "gpt 2x2x1, sequence parallel, two chunks": Layout(family="gpt", tensor=2, stages=2, chunks=2, sequence=True),
    "gpt 2x2x2, sequence parallel, distributed optimizer, overlapped": Layout(
        family="gpt", tensor=2, stages=2, replicas=2, sequence=True, distributed_optimizer=True, overlap=True
    ),
    "gpt 4x2x1, sequence parallel, full": Layout(family="gpt", tensor=4, stages=2, sequence=True, recompute=("full",)),
    "gpt 1x1x4, distributed optimizer": Layout(family="gpt", replicas=4, distributed_optimizer=True),
    "t5 1x1x1, recompute mixed": Layout(family="t5", recompute=MIXED),
    "t5 1x2x2, recompute mixed": Layout(family="t5", stages=2, replicas=2, recompute=MIXED, layer_overhead_us=0.0),
    "t5 1x1x2, one replica without samples": Layout(family="t5", replicas=2, idle=1),
    "t5 1x2x2, overlapped, one replica without samples": Layout(
        family="t5", stages=2, replicas=2, overlap=True, idle=1
    ),
    "t5 1x4x1": Layout(family="t5", stages=4),
    "t5 1x3x1, layers 1+2+1 *": Layout(family="t5", stages=3, split=(1, 2, 1)),
    "t5 1x2x1, two chunks, recompute mixed, of MLPs *": Layout(
        family="t5", stages=2, chunks=2, recompute=MIXED, modules=("mlp",)
    ),
    "t5 2x2x2, two chunks, distributed optimizer": Layout(
        family="t5", tensor=2, stages=2, replicas=2, chunks=2, distributed_optimizer=True
    ),
    "t5 2x2x1, sequence parallel, recompute mixed": Layout(
        family="t5", tensor=2, stages=2, sequence=True, recompute=MIXED
    ),
    "t5 1x2x2, relative positions, recompute mixed *": Layout(
        family="t5", stages=2, replicas=2, positions="relative", recompute=MIXED, layer_overhead_us=0.0
    ),
    "t5 2x2x1, rotary positions, two chunks, sequence parallel": Layout(
        family="t5", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", recompute=MIXED
    ),
    "t5 1x4x2": Layout(family="t5", stages=4, replicas=2),
    "t5 2x1x2": Layout(family="t5", tensor=2, replicas=2),
    "t5 2x2x1, recompute mixed": Layout(family="t5", tensor=2, stages=2, recompute=MIXED),
    "t5 2x2x2, distributed optimizer, overlapped": Layout(
        family="t5", tensor=2, stages=2, replicas=2, distributed_optimizer=True, overlap=True
    ),
    "t5 2x2x2, relative positions, untied": Layout(
        family="t5", tensor=2, stages=2, replicas=2, positions="relative", tied=False, recompute=MIXED
    ),
    "t5 4x2x1, full": Layout(family="t5", tensor=4, stages=2, recompute=("full",)),
    "t5 4x1x2": Layout(family="t5", tensor=4, replicas=2),
    "t5 2x4x1, sequence parallel": Layout(family="t5", tensor=2, stages=4, sequence=True),
    "t5 4x2x1, sequence parallel": Layout(family="t5", tensor=4, stages=2, sequence=True),
    "t5 1x1x4, distributed optimizer": Layout(family="t5", replicas=4, distributed_optimizer=True),
    "t5 1x2x4": Layout(family="t5", stages=2, replicas=4, layer_overhead_us=0.0),
    "t5 1x8x1, recompute mixed": Layout(family="t5", depth=8, stages=8, recompute=MIXED),
    "t5 1x8x1, layers 1+1+2+1+1+2+1+1": Layout(family="t5", depth=10, stages=8, split=(1, 1, 2, 1, 1, 2, 1, 1)),
    "t5 1x7x1, layers 1+1+1+2+1+1+1": Layout(family="t5", depth=8, stages=7, split=(1, 1, 1, 2, 1, 1, 1)),
    "t5 1x6x1, layers 1+2+1+2+1+1": Layout(family="t5", depth=8, stages=6, split=(1, 2, 1, 2, 1, 1)),
}
PACKED = {
    "gpt 1x1x1, packed": Layout(family="gpt", rows="packed"),
    "gpt 1x1x1, rows mixed, rotary positions, recompute mixed": Layout(
        family="gpt", rows="mixed", positions="rope", recompute=MIXED
    ),
    "gpt 1x2x1, packed, recompute mixed": Layout(family="gpt", stages=2, rows="packed", recompute=MIXED),
    "gpt 2x2x1, packed, two chunks, sequence parallel, rotary positions, recompute mixed *": Layout(
        family="gpt", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", rows="packed", recompute=MIXED
    ),
    "gpt 1x4x1, packed": Layout(family="gpt", stages=4, rows="packed"),
    "gpt 1x2x2, rows mixed, no positions": Layout(
        family="gpt", stages=2, replicas=2, positions="none", rows="mixed", layer_overhead_us=0.0
    ),
    "gpt 2x2x2, rows mixed, distributed optimizer, overlapped": Layout(
        family="gpt", tensor=2, stages=2, replicas=2, rows="mixed", distributed_optimizer=True, overlap=True
    ),
    "t5 1x1x1, packed, recompute mixed": Layout(family="t5", rows="packed", recompute=MIXED),
    "t5 1x2x1, packed": Layout(family="t5", stages=2, rows="packed"),
    "t5 1x2x2, rows mixed, rotary positions, recompute mixed *": Layout(
        family="t5", stages=2, replicas=2, positions="rope", rows="mixed", recompute=MIXED, layer_overhead_us=0.0
    ),
    "t5 1x2x1, packed, relative positions, recompute mixed": Layout(
        family="t5", stages=2, positions="relative", rows="packed", recompute=MIXED
    ),
    "t5 2x2x1, packed, two chunks, sequence parallel, recompute mixed": Layout(
        family="t5", tensor=2, stages=2, chunks=2, sequence=True, rows="packed", recompute=MIXED
    ),
    "t5 1x4x1, packed, two chunks": Layout(family="t5", depth=8, stages=4, chunks=2, rows="packed"),
    "t5 2x2x2, rows mixed, scatter-gather, distributed optimizer": Layout(
        family="t5",
        tensor=2,
        stages=2,
        replicas=2,
        rows="mixed",
        scatter_gather="on",
        distributed_optimizer=True,
        layer_overhead_us=50.0,
    ),
}
SLICED = {
    "gpt 1x1x1, slices *": Layout(family="gpt", rows="planned", slices=16),
    "gpt 1x2x1, slices, recompute mixed *": Layout(family="gpt", stages=2, rows="planned", slices=16, recompute=MIXED),
    "gpt 1x2x1, slices, full, rotary positions": Layout(
        family="gpt", stages=2, rows="planned", slices=8, recompute=("full",), positions="rope"
    ),
    "gpt 2x2x1, slices, two chunks, sequence parallel, rotary positions, recompute mixed *": Layout(
        family="gpt",
        tensor=2,
        stages=2,
        chunks=2,
        sequence=True,
        positions="rope",
        rows="planned",
        slices=16,
        recompute=MIXED,
    ),
    "gpt 1x2x2, slices, overlapped, recompute mixed": Layout(
        family="gpt", stages=2, replicas=2, overlap=True, rows="planned", slices=24, recompute=MIXED
    ),
    "gpt 2x2x2, slices, distributed optimizer, overlapped": Layout(
        family="gpt",
        tensor=2,
        stages=2,
        replicas=2,
        rows="planned",
        slices=16,
        distributed_optimizer=True,
        overlap=True,
    ),
    "gpt 1x4x1, slices, rules of CUDA": Layout(
        family="gpt", stages=4, rows="planned", slices=16, transfers="cuda", recompute=MIXED
    ),
}
DIVIDED = {
    "gpt 1x1x1, divided": Layout(family="gpt", divided=1),
    "gpt 1x2x1, divided, recompute mixed": Layout(family="gpt", stages=2, divided=1, recompute=MIXED),
    "gpt 2x2x1, every second divided, two chunks, sequence parallel, rotary positions, recompute mixed *": Layout(
        family="gpt", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", divided=2, recompute=MIXED
    ),
    "gpt 1x2x2, divided, two chunks, distributed optimizer, overlapped *": Layout(
        family="gpt", stages=2, replicas=2, chunks=2, divided=1, distributed_optimizer=True, overlap=True
    ),
    "gpt 1x2x2, every second divided, overlapped, one replica without samples": Layout(
        family="gpt", stages=2, replicas=2, divided=2, overlap=True, idle=1
    ),
    "gpt 1x2x1, divided, slices, recompute mixed": Layout(
        family="gpt", stages=2, divided=1, rows="planned", slices=16, recompute=MIXED
    ),
    "gpt 2x2x1, divided": Layout(family="gpt", tensor=2, stages=2, divided=1),
    "t5 1x2x2, divided, relative positions": Layout(
        family="t5", stages=2, replicas=2, divided=1, positions="relative", layer_overhead_us=0.0
    ),
    "t5 2x2x2, every second divided, distributed optimizer, overlapped": Layout(
        family="t5", tensor=2, stages=2, replicas=2, divided=2, distributed_optimizer=True, overlap=True
    ),
}
HALVED = {
    "gpt 1x2x1, layers 2.5+1.5, recompute mixed *": Layout(family="gpt", stages=2, split=(2.5, 1.5), recompute=MIXED),
    "gpt 2x2x1, layers 1.5+2.5, sequence parallel, rotary positions, untied, recompute mixed": Layout(
        family="gpt", tensor=2, stages=2, split=(1.5, 2.5), sequence=True, positions="rope", tied=False, recompute=MIXED
    ),
    "gpt 1x2x1, two chunks, layers 0.5+1.5+0.5+1.5, recompute mixed": Layout(
        family="gpt", stages=2, chunks=2, split=(0.5, 1.5, 0.5, 1.5), recompute=MIXED
    ),
    "gpt 1x2x2, layers 2.5+1.5, distributed optimizer, overlapped": Layout(
        family="gpt", stages=2, replicas=2, split=(2.5, 1.5), distributed_optimizer=True, overlap=True
    ),
    "gpt 1x2x1, layers 2.5+1.5, divided": Layout(family="gpt", stages=2, split=(2.5, 1.5), divided=1),
    "gpt 1x3x1, layers 1.5+2+0.5, packed, full": Layout(
        family="gpt", stages=3, split=(1.5, 2, 0.5), rows="packed", recompute=("full",)
    ),
    "gpt 1x2x1, layers 2.5+1.5, slices, recompute mixed": Layout(
        family="gpt", stages=2, split=(2.5, 1.5), rows="planned", slices=16, recompute=MIXED
    ),
    "t5 1x2x1, layers 1.5+2.5, recompute mixed *": Layout(family="t5", stages=2, split=(1.5, 2.5), recompute=MIXED),
    "t5 1x4x1, layers 1.5+0.5+1.5+0.5, relative positions": Layout(
        family="t5", stages=4, split=(1.5, 0.5, 1.5, 0.5), positions="relative"
    ),
    "t5 1x4x2, layers 1.5+0.5+0.5+1.5, relative positions, overlapped": Layout(
        family="t5", stages=4, replicas=2, split=(1.5, 0.5, 0.5, 1.5), positions="relative", overlap=True
    ),
    "t5 2x2x1, layers 2.5+1.5, packed, sequence parallel, recompute mixed": Layout(
        family="t5", tensor=2, stages=2, split=(2.5, 1.5), rows="packed", sequence=True, recompute=MIXED
    ),
}
HALF = {
    "gpt 1x2x1, divided, fp16": Layout(family="gpt", stages=2, divided=1, dtype="fp16", loss_scale=64.0),
    "gpt 1x2x1, every second divided, bf16": Layout(family="gpt", stages=2, divided=2, dtype="bf16"),
    "gpt 1x2x1, slices, bf16, recompute mixed": Layout(
        family="gpt", stages=2, rows="planned", slices=16, dtype="bf16", recompute=MIXED
    ),
    "gpt 1x2x1, slices, fp16": Layout(family="gpt", stages=2, rows="planned", slices=16, dtype="fp16", loss_scale=64.0),
    "gpt 1x2x1, bf16 *": Layout(family="gpt", stages=2, dtype="bf16"),
    "gpt 2x2x1, bf16, two chunks, recompute mixed": Layout(
        family="gpt", tensor=2, stages=2, chunks=2, dtype="bf16", recompute=MIXED
    ),
    "gpt 1x2x2, fp16, distributed optimizer": Layout(
        family="gpt", stages=2, replicas=2, dtype="fp16", loss_scale=64.0, distributed_optimizer=True
    ),
    "t5 1x2x2, bf16, distributed optimizer": Layout(
        family="t5", stages=2, replicas=2, dtype="bf16", distributed_optimizer=True
    ),
    "t5 2x2x1, bf16, recompute mixed": Layout(family="t5", tensor=2, stages=2, dtype="bf16", recompute=MIXED),
    "gpt 1x2x1, packed, bf16, recompute mixed": Layout(
        family="gpt", stages=2, rows="packed", dtype="bf16", recompute=MIXED
    ),
    "t5 1x2x1, rows mixed, bf16": Layout(family="t5", stages=2, rows="mixed", dtype="bf16"),
    "t5 1x2x1, packed, fp16": Layout(family="t5", stages=2, rows="packed", dtype="fp16", loss_scale=64.0),
    "t5 1x2x1, fp16": Layout(family="t5", stages=2, dtype="fp16", loss_scale=64.0),
}


@pytest.mark.parametrize("layout", table(LAYOUTS | PACKED | SLICED | DIVIDED | HALVED))
def test_a_layout_trains_as_one_process_with_samples_one_by_one(layout):
    expected = reference(layout.model)
    results = on_ranks("trainer.train", layout)
    assert_close(gradients_of(results), gradients_of([expected]), 1e-4)
    for result in results:
        assert result["tokens"] == expected["tokens"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert not any(result["overflowed"])
    whole([result["weights"] for result in results], tolerance=0)  # copies are equal still, those of tied weights too
    counts = results[0]["micro_batches"]
    assert counts.count(0) == layout.idle
    if max(counts) > 1:
        assert len({tuple(shape) for shape in results[0]["shapes"]}) > 1, "micro-batches of varying shape"
    if layout.slices:
        assert results[0]["cut"] >= 3
    if layout.rows != "padded":
        assert any(results[0]["packed"]), "samples share a row"
        assert layout.rows == "packed" or not all(results[0]["packed"])
    if len(layout.recompute) > 1:
        assert set(results[0]["modes"]) == set(layout.recompute[: max(counts)])


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
    found = [deviation(on_ranks("trainer.train", order), reference(alone.model)) for order in orders]
    return max(g for g, _ in found), max(losses for _, losses in found)
