"""The harness itself: results in order, every rank's traceback, a deadline that says where ranks hang."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import RanksFailedError, run_ranks


def _sum(*, rank: int, world_size: int, scale: int) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return {"total": total}


def _fail_on_one(*, rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one's own message")
    return rank


def _hang(*, rank: int, world_size: int) -> None:
    time.sleep(60)


def test_results_come_in_rank_order_from_one_job() -> None:
    results = run_ranks(_sum, 3, {"scale": 2})
    assert [r["total"].item() for r in results] == [6.0, 6.0, 6.0]


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 1: Traceback[\s\S]*rank one's own message"):
        run_ranks(_fail_on_one, 2)


def test_a_hanging_rank_shows_where_it_hangs() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0: did not end in time[\s\S]*in _hang"):
        run_ranks(_hang, 1, deadline_s=3)
