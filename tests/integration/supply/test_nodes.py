"""Four ranks that pretend to be two nodes: which planner plans where, and plans that a node's first rank hands on."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynapipe.errors import PlannerFailedError
from tests.helpers.entry_scripts import words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

PER_NODE = 2
FLAGS = "--pipeline-model-parallel-size 2 --train-iters 20 --dynapipe-planners 2 --dynapipe-store-bind 127.0.0.1"


def supplied(*, rank: int, world_size: int, data: str, folder: str) -> dict[str, Any]:
    """The planners of this rank's node, and what it fetches of three iterations."""
    os.environ |= {"LOCAL_RANK": str(rank % PER_NODE), "LOCAL_WORLD_SIZE": str(PER_NODE)}
    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable("cpu")
    from megatron_dynapipe.integration.flags import command_line
    from megatron_dynapipe.integration.supply.plan_supply import PlanSupply
    from megatron_dynapipe.runtime.control_group import ControlGroup
    from megatron_dynapipe.units import ModelFamily

    report = Path(folder) / f"node-{rank // PER_NODE}"
    _, run = command_line.parse(ModelFamily.GPT, words("gpt", Path(data), FLAGS, report=report))
    dist.init_process_group("gloo")
    control, split, place = ControlGroup(timeout_s=60), run.inputs.splits[0], (rank % 2, rank // 2)
    device = torch.device("cpu")
    with PlanSupply(run, control, run.inputs, device=device, replica=place[0], stage=place[1]) as supply:
        entries = [supply._fetch(split, 0, iteration) for iteration in range(3)]
        dist.barrier()
    return {
        "planners": sorted(path.name for path in report.glob("planner-*.log")),
        "fetches": supply._source is not None,
        "places": [(entry.iteration, entry.replica, entry.stage_plan.stage) for entry in entries],
        "digests": [entry.plan_digest for entry in entries],
    }


def test_the_first_rank_of_each_node_starts_its_planners_and_hands_plans_on(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", lengths=(1, 30))
    ranks = run_ranks(supplied, 4, {"data": str(data), "folder": str(tmp_path)})
    for number, rank in enumerate(ranks):
        node = number // PER_NODE
        assert rank["planners"] == [f"planner-{planner}.log" for planner in (node, node + 2)]
        assert rank["fetches"] == (number % PER_NODE == 0)
        assert rank["places"] == [(iteration, number % 2, number // 2) for iteration in range(3)]
        assert rank["digests"] == ranks[0]["digests"], "one plan on all nodes"
    assert len(set(ranks[0]["digests"])) == 3


def handed_on(*, rank: int, world_size: int) -> list[Any]:
    """A plan, an error and the end, from the first rank of each node to its other."""
    from megatron_dynapipe.integration.supply.node import NodeGroup

    dist.init_process_group("gloo")
    group = NodeGroup(rank, [True, False, True, False], timeout_s=30)
    if group.is_first:
        group.give(3, {other: f"plan of {other}".encode() for other in group.ranks})
        group.fail(3, PlannerFailedError(f"rank {rank} failed", hint="look there"))
        group.end(3)
        dist.barrier()
        return [list(group.ranks)]
    received: list[Any] = [group.receive(3)]
    for _ in range(2):
        try:
            group.receive(3)
        except PlannerFailedError as error:
            received.append((error.message, error.hint))
    dist.barrier()
    return received


def test_a_plan_an_error_and_the_end_reach_the_other_ranks_of_a_node_alone() -> None:
    ranks = run_ranks(handed_on, 4)
    assert [ranks[0], ranks[2]] == [[[0, 1]], [[2, 3]]]
    for first in (0, 2):
        plan, failed, ended = ranks[first + 1]
        assert plan == f"plan of {first + 1}".encode()
        assert failed == (f"rank {first} failed", "look there")
        assert ended == (f"rank {first}, which fetches this node's plans, has ended", None)
