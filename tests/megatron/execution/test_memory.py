"""Nothing is kept from iteration to iteration: two hundred of varying shapes, with flat memory."""

import pytest

from tests.helpers.layouts.layout import Layout, on_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(stages=2, chunks=2), Layout(family="t5", stages=2), Layout(family="t5", stages=2, rows="mixed")],
    ids=["gpt, two chunks", "t5", "t5, packed and padded rows"],
)
def test_two_hundred_iterations_of_varying_shapes_leave_nothing_behind(layout):
    for result in on_ranks("probes.count_tensors", layout, iterations=200, deadline_s=280):
        assert result["shapes"] > 10, "micro-batches of varying shape"
        assert result["tensors"][-1] <= result["tensors"][0], "live tensors"
        assert result["bytes"][-1] <= result["bytes"][0], "and what they hold"
        assert result["python_kb"][-1] - result["python_kb"][0] < 300, "Python's own objects"


def test_an_iteration_leaves_no_graph_behind():
    assert on_ranks("probes.held_graphs", Layout(stages=2)) == [0, 0]
