"""Rows of other trainers held against their own code, of checkouts that are named: thousands of random batches each.

    MEGATRON_CHECKOUT=… VERL_CHECKOUT=… SLIME_CHECKOUT=… python -m pytest tests/upstream/test_packing.py

Files of a checkout are executed with everything that they import of their own package, and do not need, left out.
"""

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.planning.dp_balanced import dp_balanced
from benchmarks.planning.dynamic_cp import dynamic_cp
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.ways.rivals.rules import RIVALS, Room, Rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES = 3000
HIDDEN = 64


def loaded(variable: str, *files: str) -> SimpleNamespace:
    """What files of the checkout define, one after another; names of earlier ones take the place of later imports."""
    if (checkout := os.environ.get(variable)) is None:
        pytest.skip(f"{variable} names no checkout")
    defined: dict[str, Any] = {}

    def imported(name: str, *more: Any) -> Any:
        own = name.partition(".")[0] == files[0].partition("/")[0]
        return MagicMock(**defined) if own else __import__(name, *more)

    for file in files:
        names = {"__name__": file, "__builtins__": vars(builtins) | {"__import__": imported}}
        exec(compile(Path(checkout, file).read_text(encoding="utf-8"), file, "exec"), names)
        defined |= {name: value for name, value in names.items() if not name.startswith("__")}
    return SimpleNamespace(**defined)


def batches() -> list[tuple[list[int], Room]]:
    """Lengths with long tails, in numbers that replicas divide, and rows that hold each of them."""
    draw, found = np.random.default_rng(11), []
    while len(found) < CASES:
        replicas, group = int(draw.choice([1, 2, 3, 4, 8])), int(draw.choice([1, 1, 2, 4]))
        samples = replicas * int(draw.integers(1, 1 + 80 // replicas))
        lengths = np.ceil(draw.lognormal(4, 1, samples)).clip(1, 4000).astype(int).tolist()
        positions = int(max(lengths) * draw.uniform(1, 3))
        found.append((lengths, Room(positions=positions, replicas=replicas, group=group, hidden_size=HIDDEN)))
    return found


def held(rival: str, upstream: Callable[[list[int], Room], Rows | None], *, in_order: bool = True) -> None:
    """Every batch that upstream's rule serves has the same rows on each replica, those it refuses none of more."""
    served = 0
    for lengths, room in batches():
        expected = upstream(lengths, room)
        if expected is None:
            continue
        found = (RIVALS | {"dp_balanced": dp_balanced})[rival](lengths, room)
        by_replica = [[found[r :: room.replicas], expected[r :: room.replicas]] for r in range(room.replicas)]
        for own, other in by_replica:
            assert (own if in_order else sorted(map(sorted, own))) == (
                other if in_order else sorted(map(sorted, other))
            )
        served += 1
    assert served > CASES / 2


def test_megatron() -> None:
    """`dp_balanced`, and the ranks of `default_dynamic_cp`, where the checkout has it (dev)."""
    files = ("megatron/core/datasets/data_schedule_utils.py", "megatron/core/datasets/data_schedule.py")
    core = loaded("MEGATRON_CHECKOUT", *files)

    def rows(lengths: list[int], room: Room) -> Rows | None:
        group = room.group if room.group > 1 else None
        try:
            groups = core.DpBalancedScheduler(room.positions, 1, room.replicas, group).get_groups_and_subsamples(
                list(enumerate(lengths))
            )
        except AssertionError:
            return None
        return [row for ranks in groups for row in ranks]

    held("dp_balanced", rows)
    if not hasattr(core, "next_hdp_group_packing_aware"):
        return
    for lengths, room in batches():
        positions = max(room.positions // room.replicas, 1)
        try:
            found = dynamic_cp(lengths, positions, room.replicas)
        except PlanningError:
            continue
        by_rank = [[sorted(group.samples) for group in groups for _ in range(group.ranks)] for groups in found]
        scheduler = core.DefaultDynamicCPScheduler(positions, 1, room.replicas, None)
        expected = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
        assert by_rank == [[sorted(ids) for ids in ranks] for ranks in expected]


def test_verl() -> None:
    """Replicas by work as its trainer balances them, then each replica's micro-batches, as many on all."""
    import torch

    verl = loaded("VERL_CHECKOUT", "verl/utils/seqlen_balancing.py")

    def rows(lengths: list[int], room: Room) -> Rows | None:
        work = verl.calculate_workload(torch.tensor(lengths)).tolist()
        replicas = verl.get_seqlen_balanced_partitions(work, room.replicas, equal_size=True)
        batches = [_verl_batch([lengths[i] for i in ids]) for ids in replicas]
        group, count, made = room.group if room.group > 1 else None, 1, []
        for _ in range(2):  # the second time with the number that the replicas agree on
            try:
                made = [
                    verl.rearrange_micro_batches(
                        batch, room.positions, num_batches_divided_by=group, min_num_micro_batch=count
                    )[1]
                    for batch in batches
                ]
            except AssertionError:
                return None
            count = max(map(len, made))
        columns = [[[ids[i] for i in row] for row in micro] for ids, micro in zip(replicas, made, strict=True)]
        return [row for across in zip(*columns, strict=True) for row in across]

    held("verl", rows)


def _verl_batch(lengths: list[int]) -> dict[str, Any]:
    import torch

    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": mask, "attention_mask": mask.long()}


def test_slime() -> None:
    """With `balance_by_flops` and `balance_data`, of a model of one layer whose head costs nothing."""
    files = ("flops_utils", "seqlen_balancing", "dp_schedule")
    slime = loaded("SLIME_CHECKOUT", *(f"slime/utils/{file}.py" for file in files))
    model = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16}
    model |= {"ffn_hidden_size": 4 * HIDDEN, "vocab_size": 0, "num_experts": None}
    asks = {"use_dynamic_batch_size": True, "balance_by_flops": True, "balance_data": True}

    def rows(lengths: list[int], room: Room) -> Rows | None:
        sizes = {"dp_size": room.replicas, "cp_size": 1, "vpp_size": 1 + (room.group > 1)}
        sizes["microbatch_group_size_per_vp_stage"] = room.group
        args, every = SimpleNamespace(max_tokens_per_gpu=room.positions, **model, **asks), range(len(lengths))
        try:
            ids, micro, *_ = slime.build_dp_schedule(
                args, sizes, lengths, global_batch_size=len(lengths), rollout_indices=[*every]
            )
        except AssertionError:
            return None
        columns = [[[ids[rank][i] for i in row] for row in micro[rank]] for rank in range(room.replicas)]
        return [row for across in zip(*columns, strict=True) for row in across]

    held("slime", rows, in_order=False)
