"""Layouts against one process: gradients of one iteration and losses of five, from the same weights.

The reference runs samples one by one, unpadded, without Megatron's schedules, reductions or optimizer.
"""

import functools

import pytest
import torch

from tests.helpers.processes import run_ranks
from tests.integration.models.compare import assert_close, relative_error


def call(rank: int, world_size: int, function: str, **arguments: object) -> object:
    """Run a function of `layout_ranks`, whose import of Megatron only the ranks should see."""
    from tests.integration import layout_ranks

    return getattr(layout_ranks, function)(rank, world_size, **arguments)


@functools.cache
def reference(family: str, **model: object) -> dict:
    wanted = {"family": family, **model}
    return run_ranks(call, 1, {"function": "train_one_by_one", "layout": wanted})[0]


MODEL = ("family", "positions", "tied", "depth")
"""The fields of a layout that say what the model is."""


def whole(results: list[dict]) -> dict[str, torch.Tensor]:
    """Gradients of the whole model; ranks that hold the same part of a weight must have the same gradient."""
    gradients: dict[str, torch.Tensor] = {}
    seen: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for result in results:
        for name, offset, shape, part in result["gradients"]:
            known = seen.setdefault((name, tuple(offset)), part)
            assert relative_error(part, known) < 1e-5, name
            full = gradients.setdefault(name, torch.zeros(shape))
            full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return gradients


def ranks(layout: dict) -> int:
    return layout.get("tensor", 1) * layout.get("stages", 1) * layout.get("replicas", 1)


def layout(family: str, **fields: object) -> dict:
    return {"family": family, **fields}


MIXED = ("full", "selective", "none")
LAYOUTS = {
    # model x tensor x stages x replicas, then what else; a * marks the core that runs every day
    "gpt 1x1x1": layout("gpt"),
    "gpt 1x1x1, recompute mixed *": layout("gpt", recompute=MIXED),
    "gpt 1x2x1, recompute mixed": layout("gpt", stages=2, recompute=MIXED),
    "gpt 1x2x2 *": layout("gpt", stages=2, replicas=2, layer_overhead_us=0.0),
    "gpt 1x4x1, full": layout("gpt", stages=4, recompute=("full",)),
    "gpt 1x2x1, layers 3+1 *": layout("gpt", stages=2, split=(3, 1)),
    "gpt 1x3x1, layers 1+2+1, selective": layout("gpt", stages=3, split=(1, 2, 1), recompute=("selective",)),
    "gpt 1x2x1, two chunks, odd *": layout("gpt", stages=2, chunks=2, layer_overhead_us=0.5),
    "gpt 1x2x1, two chunks, recompute mixed": layout("gpt", stages=2, chunks=2, recompute=MIXED),
    "gpt 1x2x2, two chunks, overlapped": layout("gpt", stages=2, chunks=2, replicas=2, overlap=True),
    "gpt 1x2x2, two chunks, distributed optimizer *": layout(
        "gpt", stages=2, chunks=2, replicas=2, distributed_optimizer=True
    ),
    "gpt 2x1x1 *": layout("gpt", tensor=2),
    "gpt 2x2x1, recompute mixed *": layout("gpt", tensor=2, stages=2, recompute=MIXED),
    "gpt 2x2x2": layout("gpt", tensor=2, stages=2, replicas=2),
    "gpt 2x2x1, two chunks": layout("gpt", tensor=2, stages=2, chunks=2),
    "gpt 2x2x2, distributed optimizer, overlapped": layout(
        "gpt", tensor=2, stages=2, replicas=2, distributed_optimizer=True, overlap=True
    ),
    "gpt 1x2x2, rotary positions, untied": layout("gpt", stages=2, replicas=2, positions="rope", tied=False),
    "gpt 2x2x1, two chunks, sequence parallel, rotary positions, untied": layout(
        "gpt", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", tied=False, recompute=MIXED
    ),
    "gpt 4x2x1": layout("gpt", tensor=4, stages=2),
    "gpt 4x1x1, Megatron's attention": layout("gpt", tensor=4, attention="megatron"),
    "gpt 4x1x2": layout("gpt", tensor=4, replicas=2),
    "gpt 2x1x4, sequence parallel": layout("gpt", tensor=2, replicas=4, sequence=True),
    "gpt 2x4x1, selective": layout("gpt", tensor=2, stages=4, recompute=("selective",)),
    "gpt 1x2x3": layout("gpt", stages=2, replicas=3, layer_overhead_us=0.0),
    "gpt 1x2x4": layout("gpt", stages=2, replicas=4, layer_overhead_us=0.0),
    "gpt 1x8x1, recompute mixed": layout("gpt", depth=8, stages=8, recompute=MIXED),
    "gpt 1x8x1, layers 2+1+1+1+1+1+2+1": layout("gpt", depth=10, stages=8, split=(2, 1, 1, 1, 1, 1, 2, 1)),
    "gpt 1x5x1, two chunks": layout("gpt", depth=10, stages=5, chunks=2),
    "gpt 2x2x1, sequence parallel, recompute mixed *": layout(
        "gpt", tensor=2, stages=2, sequence=True, recompute=MIXED
    ),
    "gpt 2x2x1, sequence parallel, two chunks": layout("gpt", tensor=2, stages=2, chunks=2, sequence=True),
    "gpt 2x2x2, sequence parallel, distributed optimizer, overlapped": layout(
        "gpt", tensor=2, stages=2, replicas=2, sequence=True, distributed_optimizer=True, overlap=True
    ),
    "gpt 4x2x1, sequence parallel, full": layout("gpt", tensor=4, stages=2, sequence=True, recompute=("full",)),
    "gpt 1x1x4, distributed optimizer": layout("gpt", replicas=4, distributed_optimizer=True),
    "t5 1x1x1, recompute mixed": layout("t5", recompute=MIXED),
    "t5 1x2x2, recompute mixed *": layout("t5", stages=2, replicas=2, recompute=MIXED, layer_overhead_us=0.0),
    "t5 1x3x1, layers 1+2+1 *": layout("t5", stages=3, split=(1, 2, 1)),
    "t5 1x2x1, two chunks, recompute mixed *": layout("t5", stages=2, chunks=2, recompute=MIXED),
    "t5 2x2x2, two chunks, distributed optimizer": layout(
        "t5", tensor=2, stages=2, replicas=2, chunks=2, distributed_optimizer=True
    ),
    "t5 2x2x1, sequence parallel, recompute mixed *": layout("t5", tensor=2, stages=2, sequence=True, recompute=MIXED),
    "t5 1x2x2, relative positions, recompute mixed *": layout(
        "t5", stages=2, replicas=2, positions="relative", recompute=MIXED, layer_overhead_us=0.0
    ),
    "t5 2x2x1, rotary positions, two chunks, sequence parallel": layout(
        "t5", tensor=2, stages=2, chunks=2, sequence=True, positions="rope", recompute=MIXED
    ),
    "t5 1x4x2": layout("t5", stages=4, replicas=2),
    "t5 2x1x2": layout("t5", tensor=2, replicas=2),
    "t5 2x2x1, recompute mixed *": layout("t5", tensor=2, stages=2, recompute=MIXED),
    "t5 2x2x2, distributed optimizer, overlapped": layout(
        "t5", tensor=2, stages=2, replicas=2, distributed_optimizer=True, overlap=True
    ),
    "t5 2x2x2, relative positions, untied": layout(
        "t5", tensor=2, stages=2, replicas=2, positions="relative", tied=False, recompute=MIXED
    ),
    "t5 4x2x1, full": layout("t5", tensor=4, stages=2, recompute=("full",)),
    "t5 4x1x2": layout("t5", tensor=4, replicas=2),
    "t5 2x4x1, sequence parallel": layout("t5", tensor=2, stages=4, sequence=True),
    "t5 4x2x1, sequence parallel": layout("t5", tensor=4, stages=2, sequence=True),
    "t5 1x1x4, distributed optimizer": layout("t5", replicas=4, distributed_optimizer=True),
    "t5 1x2x4": layout("t5", stages=2, replicas=4, layer_overhead_us=0.0),
    "t5 1x8x1, recompute mixed": layout("t5", depth=8, stages=8, recompute=MIXED),
    "t5 1x8x1, layers 1+1+2+1+1+2+1+1": layout("t5", depth=10, stages=8, split=(1, 1, 2, 1, 1, 2, 1, 1)),
    "t5 1x7x1, layers 1+1+1+2+1+1+1": layout("t5", depth=8, stages=7, split=(1, 1, 1, 2, 1, 1, 1)),
    "t5 1x6x1, layers 1+2+1+2+1+1": layout("t5", depth=8, stages=6, split=(1, 2, 1, 2, 1, 1)),
}
HALF = {
    "gpt 1x2x1, bf16 *": layout("gpt", stages=2, dtype="bf16"),
    "gpt 2x2x1, bf16, two chunks, recompute mixed": layout(
        "gpt", tensor=2, stages=2, chunks=2, dtype="bf16", recompute=MIXED
    ),
    "gpt 1x2x2, fp16, distributed optimizer *": layout(
        "gpt", stages=2, replicas=2, dtype="fp16", loss_scale=64.0, distributed_optimizer=True
    ),
    "t5 1x2x2, bf16, distributed optimizer": layout(
        "t5", stages=2, replicas=2, dtype="bf16", distributed_optimizer=True
    ),
    "t5 2x2x1, bf16, recompute mixed": layout("t5", tensor=2, stages=2, dtype="bf16", recompute=MIXED),
    "t5 1x2x1, fp16": layout("t5", stages=2, dtype="fp16", loss_scale=64.0),
}


def table(layouts: dict[str, dict]) -> list:
    slow = pytest.mark.slow
    return [pytest.param(row, id=name, marks=() if name.endswith("*") else slow) for name, row in layouts.items()]


@pytest.mark.parametrize("wanted", table(LAYOUTS))
def test_a_layout_trains_as_one_process_with_samples_one_by_one(wanted):
    expected = reference(**{name: wanted[name] for name in MODEL if name in wanted})
    results = run_ranks(call, ranks(wanted), {"function": "train", "layout": wanted})
    assert_close(whole(results), whole([expected]), 1e-4)
    for result in results:
        assert result["tokens"] == expected["tokens"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert not any(result["overflowed"])
    if "recompute" in wanted:
        assert set(results[0]["modes"]) == set(wanted["recompute"][: max(results[0]["micro_batches"])])


@pytest.mark.parametrize("wanted", table(HALF))
def test_a_layout_in_half_precision_stays_within_its_noise(wanted):
    """Twice as far from the fp32 reference, at most, as one process that gets the same samples in other orders.

    Losses are means over many tokens and their noise is small: for them one rounding of the type is allowed too.
    """
    expected, (gradients, losses) = reference(wanted["family"]), half_noise(wanted["family"], wanted["dtype"])
    results = run_ranks(call, ranks(wanted), {"function": "train", "layout": wanted})
    rounding = torch.finfo(torch.bfloat16 if wanted["dtype"] == "bf16" else torch.float16).eps
    actual = deviation(results, expected)
    assert actual[0] <= 2 * gradients
    assert actual[1] <= max(2 * losses, rounding)


def deviation(results: list[dict], expected: dict) -> tuple[float, float]:
    """Relative distance of all gradients together, and of five losses, from the reference's."""
    actual, wanted = whole(results), whole([expected])
    gradients = [torch.cat([of[name].flatten() for name in sorted(wanted)]) for of in (actual, wanted)]
    losses = [torch.tensor(of["losses"]) for of in (results[-1], expected)]
    return relative_error(*gradients), relative_error(*losses)


@functools.cache
def half_noise(family: str, dtype: str) -> tuple[float, float]:
    alone = layout(family, dtype=dtype, loss_scale=64.0 if dtype == "fp16" else None)
    orders = [alone | {"samples": samples} for samples in (tuple(range(12)), tuple(reversed(range(12))))]
    found = [
        deviation(run_ranks(call, 1, {"function": "train", "layout": order}), reference(family)) for order in orders
    ]
    return max(g for g, _ in found), max(losses for _, losses in found)
