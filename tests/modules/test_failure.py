"""A rank that fails or ends outside of Megatron: its peers raise within seconds, and say which rank it was."""

import os
import time
from typing import Any

import pytest
import torch

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.runtime import control_group
from tests.helpers.processes import RanksFailedError, run_ranks
from tests.modules.test_pipeline import toy_batch, toy_loss, toy_pipeline


def fail(rank: int, world_size: int, width: int) -> None:
    """First the loss of one rank raises, then, in new groups, another one dies; everyone says what it got."""
    control_group.WIDTH = width
    part, pipeline = toy_pipeline(replicas=2, split_points=["layers.1"])

    def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        if rank == 2:
            raise ValueError("no such label")
        return toy_loss(output, batch)

    pipeline._loss_fn, batch = loss_fn, toy_batch(4, 5, part.replica)
    with pytest.raises(ValueError if rank == 2 else ExecutionError) as raised:
        pipeline.step(batch)
    said = [str(raised.value)]
    with pytest.raises(ExecutionError) as raised:
        pipeline.step(batch)
    said.append(str(raised.value))
    part, pipeline = toy_pipeline(replicas=2, split_points=["layers.1"])
    pipeline.step(batch)
    if rank == 3:
        os._exit(7)
    begin = time.monotonic()
    with pytest.raises(ExecutionError) as raised:
        pipeline.step(batch)
    raise AssertionError(f"{said} {raised.value} {time.monotonic() - begin < 60}")


@pytest.mark.parametrize("width", [2, 64], ids=["ranks agree over groups of two", "over one group"])
def test_peers_name_the_rank_that_failed(width):
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(fail, 4, {"width": width})
    first, dead = "rank 2 failed: ValueError: no such label", "rank 3 has ended or is cut off"
    ranks = [text for text in str(raised.value).splitlines() if text.startswith("AssertionError")]
    assert len(ranks) == 3, str(raised.value)
    assert all(text.count(first) == (1 if rank == 2 else 2) for rank, text in enumerate(ranks)), ranks
    assert all(f"the connection to a peer is lost: {dead} True" in text for text in ranks), ranks
