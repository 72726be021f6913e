"""Every message of a planned step, counted: none of a shape."""

from collections import Counter
from typing import Any

import torch.distributed as dist

from megatron_dynapipe import Pipeline, split_model
from megatron_dynapipe.plan.instructions import SendStart
from tests.helpers.processes import run_ranks
from tests.modules.test_pipeline import toy, toy_batch, toy_loss
from tests.modules.test_planning import planner_of

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


def steps(rank: int, world_size: int) -> list[dict[str, int]]:
    dist.init_process_group("gloo")
    counts, found = count_calls(), []
    part = split_model(toy(), toy_batch(2, 3, 0), stages=2)
    pipeline = Pipeline(part, None, toy_loss, planner=planner_of())
    for length in (8, 9, 30, 9):
        counts.clear()
        pipeline.step(toy_batch(6, length, 0))
        transfers = [e.instruction for e in pipeline.trace.events() if isinstance(e.instruction, SendStart)]
        found.append({**counts, "transfers": len(transfers)})
    return found


def test_messages_of_a_planned_step():
    """Of stages of one's own, which exchange new shapes: `test_stage.py`."""
    for found in run_ranks(steps, 2):
        for step in found:
            assert "send" not in step and "recv" not in step and "broadcast" not in step, "no shape is sent"
            assert step["isend"] == step["irecv"] == step["transfers"] and "integers sent" not in step
        # one agreement, and another where shapes are traced anew, on all ranks: at first, and for rows of one sample
        assert {step["all_gather"] for step in found} <= {1, 2} and found[-1]["all_gather"] == 1
        assert {step["all_reduce"] for step in found} == {2}, "whatever it moves: the loss, and a weight that is tied"
