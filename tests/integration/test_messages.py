"""What varying shapes cost in messages: Megatron sends every tensor's shape ahead of it, a plan's are known."""

import argparse
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_ranks

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "executor"


def count(*, rank: int, world_size: int) -> dict[str, dict[str, int]]:
    sys.path.insert(0, str(BENCHMARK))
    import messages
    import overhead

    parser = argparse.ArgumentParser()
    overhead.add_arguments(parser)
    options = parser.parse_args(["--hidden", "16", "--length", "32", "--size", "2", "--micro-batches", "5"])
    options.seed = 0
    with overhead.processes() as device:
        shapes = messages.draw_shapes(options)
        assert len(set(shapes)) > 1
        theirs, ours = overhead.runners(options, shapes, device, varying=True)
        return {"theirs": messages.count(theirs), "ours": messages.count(ours)}


@pytest.mark.parametrize("stages", [2, 4])
def test_no_shape_is_sent_and_no_device_waited_for(stages):
    first, *others = run_ranks(count, stages)
    assert all(other == first for other in others)
    theirs, ours = first["theirs"], first["ours"]
    assert ours["tensor messages"] == theirs["tensor messages"] == 2 * 5 * (stages - 1)
    assert ours["tensor bytes"] == theirs["tensor bytes"]
    assert (ours["shape messages"], theirs["shape messages"]) == (0, theirs["tensor messages"])
    assert ours["device synchronisations"] == 0
    assert theirs["device synchronisations"] >= theirs["shape messages"]
    assert theirs["reads of tensors"] - ours["reads of tensors"] == theirs["shape messages"]
    assert ours["waits for transfers"] < theirs["waits for transfers"]
