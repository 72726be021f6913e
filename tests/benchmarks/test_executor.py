"""The executor beside Megatron's own schedule on micro-batches of varying shape: equal gradients, fewer messages."""

import argparse
import gc

import pytest
import torch

from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.runtime.memory import LiveStorages
from tests.helpers.layouts.compare import relative_error
from tests.helpers.processes import run_ranks


def run_both(*, chunks: int, rank: int, world_size: int) -> dict[str, object]:
    """What Megatron's schedule and the executor sent in one iteration, and the gradients that each left."""
    from benchmarks.executor import messages, overhead, pairs

    parser = argparse.ArgumentParser()
    pairs.add_arguments(parser)
    options = parser.parse_args(["--hidden", "16", "--length", "32", "--size", "2", "--micro-batches", "5"])
    options.seed = 0
    with overhead.processes(chunks) as device:
        shapes = messages.draw_shapes(options) if chunks == 1 else [Shape(2, 32)] * 6
        assert (len(set(shapes)) > 1) == (chunks == 1)
        models = [overhead.build(options, device, chunk=chunk, varying=chunks == 1) for chunk in range(chunks)]
        results = {}
        for name, iteration in zip(("theirs", "ours"), overhead.runners(models, options, shapes, device), strict=True):
            counts = messages.count(iteration)
            results[name] = counts, [weight.main_grad.clone() for model in models for weight in model.parameters()]
        return results


@pytest.mark.parametrize("stages", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_as_megatrons_schedule_without_shapes_in_messages(stages):
    """Megatron sends every tensor's shape ahead of it and waits for the device to read it; a plan's are known."""
    theirs, ours = counts_of_both(stages)
    assert ours["tensor messages"] == theirs["tensor messages"] == 2 * 5 * (stages - 1)
    assert ours["tensor bytes"] == theirs["tensor bytes"]
    assert (ours["shape messages"], theirs["shape messages"]) == (0, theirs["tensor messages"])
    assert ours["device synchronisations"] == 0
    assert theirs["device synchronisations"] >= theirs["shape messages"]
    assert theirs["reads of tensors"] - ours["reads of tensors"] == theirs["shape messages"]
    assert stages == 1 or ours["waits for transfers"] < theirs["waits for transfers"]


def test_as_megatrons_interleaved_schedule_with_virtual_stages():
    theirs, ours = counts_of_both(2, chunks=2)
    assert ours["tensor messages"] == theirs["tensor messages"] == 2 * 6 * 3
    assert ours["tensor bytes"] == theirs["tensor bytes"]


def counts_of_both(stages: int, *, chunks: int = 1) -> tuple[dict[str, int], dict[str, int]]:
    """Megatron's counts and the executor's, the same on every rank, after gradients were found equal."""
    results = run_ranks(run_both, stages, {"chunks": chunks})
    for result in results:
        for actual, expected in zip(result["ours"][1], result["theirs"][1], strict=True):
            assert torch.equal(actual, expected) or relative_error(actual, expected) < 1e-5
    both, *others = ((result["theirs"][0], result["ours"][0]) for result in results)
    assert all(other == both for other in others)
    return both


def run_pieces(*, divided: bool, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Bytes alive after every iteration of a sample in pieces, and at most in it."""
    from benchmarks.executor import overhead, pairs, pieces

    parser = argparse.ArgumentParser()
    pairs.add_arguments(parser)
    options = parser.parse_args(["--hidden", "16", "--length", "64", "--layers", "2"])
    with overhead.processes() as device:
        iteration, sizes = pieces.iterations(options, device), []
        iteration(pieces.pieces_of(16, 4), divided=divided)
        gc.freeze()  # collections are quick then
        with LiveStorages() as live:
            for _ in range(20):
                iteration(pieces.pieces_of(16, 4), divided=divided)
                gc.collect()
                sizes.append((live.bytes, live.peak_bytes))
                live.peak_bytes = live.bytes
    return sizes


@pytest.mark.parametrize("divided", [False, True])
def test_memory_of_sliced_iterations_is_flat(divided):
    after = run_ranks(run_pieces, 1, {"divided": divided})[0]
    assert len({peak for _, peak in after[1:]}) == 1
    assert all(live <= 64 for live, _ in after), "a scalar may live until the next collection"
