"""Four ranks that pretend to be two nodes: which planner plans where, and plans that a node's first rank hands on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import PlannerFailedError
from tests.helpers.entry_scripts import words
from tests.helpers.processes import in_ranks, run_ranks
from tests.helpers.random_dataset import make_dataset

PER_NODE = 2
FLAGS = "--pipeline-model-parallel-size 2 --train-iters 20 --dynapipe-planner-cores 2 --dynapipe-store-bind 127.0.0.1"


def supplied(*, rank: int, world_size: int, data: str, folder: str) -> dict[str, Any]:
    """The planner of this rank's node, and what it fetches of three iterations."""
    os.environ |= {"LOCAL_RANK": str(rank % PER_NODE), "LOCAL_WORLD_SIZE": str(PER_NODE)}
    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable("cpu")
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.megatron.flags import command_line
    from megatron_dynapipe.megatron.supply.plan_supply import PlanSupply
    from megatron_dynapipe.runtime.control_group import ControlGroup

    report = Path(folder) / f"node-{rank // PER_NODE}"
    _, run = command_line.parse(ModelFamily.GPT, words("gpt", Path(data), FLAGS, report=report))
    dist.init_process_group("gloo")
    control, split, place = ControlGroup(timeout_s=60), run.inputs.splits[0], (rank % 2, rank // 2)
    device = torch.device("cpu")
    with PlanSupply(run.sources, control, run.inputs, device=device, replica=place[0], stage=place[1]) as supply:
        entries = [supply._fetch(split, 0, iteration) for iteration in range(3)]
        if supply._source is not None:  # on a busy machine it may come late
            supply._store.wait_any([supply._keys.gain], timeout_s=60, what="what plans gain")
        said = supply.said_at_the_end()
        dist.barrier()
    return {
        "planners": sorted(path.name for path in report.glob("planner-*.log")),
        "said": said,
        "fetches": supply._source is not None,
        "places": [(entry.iteration, entry.replica, entry.stage_plan.stage) for entry in entries],
        "digests": [entry.plan_digest for entry in entries],
    }


def test_the_first_rank_of_each_node_starts_its_planner_and_hands_plans_on(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", lengths=(1, 30))
    ranks = run_ranks(supplied, 4, {"data": str(data), "folder": str(tmp_path)})
    for number, rank in enumerate(ranks):
        node = number // PER_NODE
        assert rank["planners"] == [f"planner-{node}.log"]
        load, *said = rank["said"].splitlines() or [""]
        pace, gain = said or ("", "")
        assert load.endswith(" of 2 cores of this node") if rank["fetches"] else not rank["said"]
        assert gain.startswith("plans are predicted to ") == rank["fetches"]
        assert ("of the job's 4 cores would keep up, " in pace) == rank["fetches"]
        assert rank["fetches"] == (number % PER_NODE == 0)
        assert rank["places"] == [(iteration, number % 2, number // 2) for iteration in range(3)]
        assert rank["digests"] == ranks[0]["digests"], "one plan on all nodes"
    assert len(set(ranks[0]["digests"])) == 3


@in_ranks(4)
def test_a_plan_an_error_and_the_end_reach_the_other_ranks_of_a_node_alone(rank: int) -> None:
    from megatron_dynapipe.megatron.supply.node import NodeGroup

    dist.init_process_group("gloo")
    group = NodeGroup(rank, [True, False, True, False], timeout_s=30)
    if group.is_first:
        assert list(group.ranks) == [rank, rank + 1]
        group.give(3, {other: f"plan of {other}".encode() for other in group.ranks})
        group.fail(3, PlannerFailedError(f"rank {rank} failed", hint="look there"))
        group.end(3)
    else:
        assert group.receive(3) == f"plan of {rank}".encode()
        ended = f"rank {rank - 1}, which fetches this node's plans, has ended"
        for told in ((f"rank {rank - 1} failed", "look there"), (ended, None)):
            with pytest.raises(PlannerFailedError) as caught:
                group.receive(3)
            assert (caught.value.message, caught.value.hint) == told
    dist.barrier()
