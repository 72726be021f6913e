"""A warmed-up pipeline trains as a cold one: nothing of the small micro-batch is left."""

from unittest import mock

import pytest
import torch
import torch._dynamo
from torch.nn.attention import flex_attention as flex

from megatron_dynapipe.megatron.execution.warm_up import ROWS
from tests.helpers.layouts.compare import relative_error
from tests.helpers.layouts.layout import Layout, on_ranks, table
from tests.megatron.models.attention_ranks import row_of

LAYOUTS = ("gpt 1x2x2, two chunks, overlapped", "t5 1x2x1, dropout *", "t5 2x2x1, sequence parallel, bf16")


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_a_warm_pipeline_trains_as_a_cold_one(layout):
    for cold, warm in zip(*(on_ranks("probes.warmed", layout, warm=warm) for warm in (False, True)), strict=True):
        assert cold["losses"] == warm["losses"] and cold["losses"][0] != cold["losses"][-1]
        assert list(dict.fromkeys(warm["modes"])) == ["none", "selective", "full"] and cold["modes"] == []
        for one, other in zip(cold["weights"], warm["weights"], strict=True):
            assert relative_error(one[3], other[3]) == 0.0


def test_rows_with_biases_are_compiled_in_the_warm_up_alone():
    """Rows of a block or less too: they are padded to more than one, whose number would be compiled in."""
    import importlib

    relative = importlib.import_module("megatron_dynapipe.megatron.models.relative_attention")
    torch._dynamo.reset()

    def run(lengths: list[int]) -> None:
        row, positions = row_of(lengths, lengths), sum(lengths)
        tensors = [torch.zeros(positions, 2, 16) for _ in range(3)]
        bias = torch.zeros(1, 2, max(lengths), max(lengths))
        attended = relative.attend_with_biases(*tensors, row, bias, causal=True, scale=1.0)
        assert attended.shape == tensors[0].shape

    compiled = torch.compile(flex.flex_attention, backend="eager", dynamic=True)
    with mock.patch.object(relative, "_attend", return_value=compiled):
        for positions in ROWS:
            run([positions // 2, positions - positions // 2])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lengths in ([20, 9], [128], [100, 156], [300, 84, 7], [640, 2]):
                run(lengths)


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_nothing_is_compiled_after_the_warm_up(family):
    """Padded and packed rows of many lengths, in training and evaluation; compiling waits for the whole device."""
    layout = Layout(family=family, stages=2, rows="mixed", recompute=("none", "full"))
    for warm, after in on_ranks("probes.activations", layout):
        torch._dynamo.reset()
        fused = torch.compile(torch.nn.functional.gelu, backend="eager")

        def run(calls, function=fused):
            for wants_gradients, shape in calls:
                with torch.set_grad_enabled(wants_gradients):
                    function(torch.empty(shape, requires_grad=True))

        run(warm)
        assert len({tuple(shape) for _, shape in after}) > 4
        with torch._dynamo.config.patch(error_on_recompile=True):
            run(after)
