"""Nothing is kept from iteration to iteration: two hundred of varying shapes, with flat memory."""

import pytest

from tests.helpers.processes import run_ranks
from tests.integration.test_matrix import layout


def call(rank: int, world_size: int, function: str, **arguments: object) -> object:
    """Run a function of `layout_memory`, whose import of Megatron only the ranks should see."""
    from tests.integration import layout_memory

    return getattr(layout_memory, function)(rank, world_size, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted", [layout("gpt", stages=2, chunks=2), layout("t5", stages=2)], ids=["gpt, two chunks", "t5"]
)
def test_two_hundred_iterations_of_varying_shapes_leave_nothing_behind(wanted):
    arguments = {"function": "count_tensors", "layout": wanted, "iterations": 200}
    for result in run_ranks(call, 2, arguments, deadline_s=280):
        assert result["shapes"] > 10, "micro-batches of varying shape"
        assert result["tensors"][-1] <= result["tensors"][0], "live tensors"
        assert result["bytes"][-1] <= result["bytes"][0], "and what they hold"
        assert result["python_kb"][-1] - result["python_kb"][0] < 300, "Python's own objects"


def test_an_iteration_leaves_no_graph_behind():
    assert run_ranks(call, 2, {"function": "held_graphs", "layout": layout("gpt", stages=2)}) == [0, 0]
