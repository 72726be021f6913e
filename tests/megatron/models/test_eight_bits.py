"""Products in eight bits: lengths, weights that are quantised once an iteration, operands that are no tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn


def config(**changes: object) -> SimpleNamespace:
    given = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "sequence_parallel": False, "tensor_model_parallel_size": 1}
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize(
    ("changes", "multiple", "whole"),
    [
        ({}, 16, False),
        ({"fp8": None}, 8, False),
        ({"fp8_recipe": "blockwise"}, 128, False),
        ({"fp8_recipe": "mxfp8", "tensor_model_parallel_size": 2}, 32, False),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 4}, 64, True),
        ({"fp8": None, "sequence_parallel": True, "tensor_model_parallel_size": 4}, 8, False),
    ],
)
def test_lengths_that_products_want(changes, multiple, whole):
    from megatron_dynapipe.megatron.models import eight_bits

    assert eight_bits.length_multiple(config(**changes)) == multiple
    assert eight_bits.keeps_whole(config(**changes)) is whole


def test_what_linears_keep_of_their_weights_is_dropped_for_the_next_pass_to_make():
    from megatron_dynapipe.megatron.execution.micro_batch_context import forget_quantised

    linear, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    kept = linear._fp8_workspaces = {"weight": object()}
    forget_quantised([nn.Sequential(linear, plain)])
    assert linear._fp8_workspaces is kept == {}, "the same dictionary, into which the linear puts the next ones"


@pytest.mark.parametrize("quantised", [False, True])
def test_a_gradient_of_a_bias_is_made_once(quantised):
    """In eight bits by the backward pass, whose operands are then no tensors; else where the operands are left."""
    from megatron_dynapipe.megatron.models.divided_linears import EngineStore, WeightHalves

    linear = nn.Linear(4, 3)
    linear.apply_bias, linear.sequence_parallel, linear.fuse_wgrad_accumulation = True, False, False
    rows, of_output = torch.randn(5, 4), torch.randn(5, 3)
    expected = of_output.t() @ rows
    halves = WeightHalves(key=(0, 0))
    operands = [SimpleNamespace(values=each) for each in (rows, of_output)] if quantised else [rows, of_output]

    def product(given, gradient):
        return (gradient.values.t() @ given.values if quantised else gradient.t() @ given), None

    EngineStore(halves, linear).put(operands, product)
    assert (linear.bias.grad is None) is quantised
    halves.add_weight_gradients((0, 0))
    torch.testing.assert_close(linear.weight.grad, expected)
