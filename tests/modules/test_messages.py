"""Every message of a planned step, counted: none of a shape."""

from collections import Counter
from typing import Any

import torch.distributed as dist

from megatron_dynapipe import Pipeline, split_model
from megatron_dynapipe.core.instructions import SendStart
from tests.helpers.processes import in_ranks
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


@in_ranks(2)
def test_messages_of_a_planned_step():
    """Of stages of one's own, which exchange new shapes: `test_stage.py`."""
    dist.init_process_group("gloo")
    counts, agreements = count_calls(), []
    part = split_model(toy(), toy_batch(2, 3, 0), stages=2)
    pipeline = Pipeline(part, None, toy_loss, planner=planner_of())
    for length in (8, 9, 30, 9):
        counts.clear()
        pipeline.step(toy_batch(6, length, 0))
        sends = [e for e in pipeline.trace.events() if isinstance(e.instruction, SendStart)]
        assert not {"send", "recv", "broadcast", "integers sent"} & counts.keys(), "no shape is sent"
        assert counts["isend"] == counts["irecv"] == len(sends)
        assert counts["all_reduce"] == 1, "a weight that is tied"
        agreements.append(counts["all_gather"] - 1)  # the loss
    # one agreement, and another where shapes are traced anew, on all ranks: at first, and for rows of one sample
    assert set(agreements) <= {1, 2} and agreements[-1] == 1
