"""Every message of a step, counted: no shape with a plan, and without one an exchange for each new shape."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynapipe.plan.instructions import SendStart
from tests.helpers.processes import run_ranks
from tests.modules.test_pipeline import toy, toy_batch, toy_loss
from tests.modules.test_planning import planner_of
from tests.modules.test_stage import Plain, squares

NAMES = ("isend", "irecv", "send", "recv", "all_gather", "all_reduce", "broadcast", "batch_isend_irecv")


def count_calls() -> Counter[str]:
    """Count calls of torch.distributed, and tensors sent that are not floating, from now on."""
    counts: Counter[str] = Counter()
    for name in NAMES:
        original = getattr(dist, name)

        def counted(*arguments: Any, original: Any = original, name: str = name, **named: Any) -> Any:
            counts[name] += 1
            if name == "isend" and not arguments[0].is_floating_point():
                counts["integers sent"] += 1
            return original(*arguments, **named)

        setattr(dist, name, counted)
    return counts


def of_one_step(counts: Counter[str], step: Any) -> dict[str, int]:
    counts.clear()
    step()
    return dict(counts)


def steps(rank: int, world_size: int) -> dict[str, list[dict[str, int]]]:
    from megatron_dynapipe import Pipeline, Stage, split_model

    dist.init_process_group("gloo")
    counts, found = count_calls(), {"planned": [], "own stages": []}
    part = split_model(toy(), toy_batch(2, 3, 0), stages=2)
    pipeline = Pipeline(part, None, toy_loss, planner=planner_of())
    for length in (8, 9, 30, 9):
        got = of_one_step(counts, lambda length=length: pipeline.step(toy_batch(6, length, 0)))
        transfers = [e.instruction for e in pipeline.trace.events() if isinstance(e.instruction, SendStart)]
        found["planned"].append({**got, "transfers": len(transfers)})
    pipeline = Pipeline(Stage(Plain(rank), {"x": torch.zeros(2, 4)}), None, squares, micro_batches=2)
    for rows in (4, 4, 5, 4, 5, 6):
        found["own stages"].append(of_one_step(counts, lambda rows=rows: pipeline.step({"x": torch.ones(rows, 4)})))
    return found


def test_messages_of_a_step():
    first, last = run_ranks(steps, 2)
    for found in (first, last):
        for step in found["planned"]:
            assert "send" not in step and "recv" not in step and "broadcast" not in step, "no shape is sent"
            assert step["isend"] == step["irecv"] == step["transfers"] and "integers sent" not in step
            assert step["all_reduce"] == 1, "one sum"
        # one agreement, and another where shapes are traced anew, on all ranks: at first, and for rows of one sample
        assert {step["all_gather"] for step in found["planned"]} <= {1, 2} and found["planned"][-1]["all_gather"] == 1
    sent = [step.get("send", 0) for step in first["own stages"]]
    received = [step.get("recv", 0) for step in last["own stages"]]
    # Micro-batches of 2 rows; 2; 3 and 2; 2; 3 and 2; 3. A new shape takes a text and its length.
    assert sent == received == [2, 0, 2, 0, 0, 0]
    assert not any(step.get("recv") for step in first["own stages"])
    quiet = {"isend": 2, "irecv": 2, "all_gather": 1, "all_reduce": 1}
    assert first["own stages"][1] == quiet, "a step agrees once and sums once, whatever it moves"
