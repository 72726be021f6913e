"""Second halves: each weight with its own operands, whatever order autograd takes them in, from the model's end on."""

import pytest
import torch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_weights_get_the_gradients_of_their_own_operands(one_by_one, device):
    from megatron_dynapipe.megatron.models.divided_linears import Operand, Product, WeightHalves

    torch.manual_seed(1)
    halves = WeightHalves()
    weights = [torch.nn.Parameter(torch.zeros(3, 3, device=device)) for _ in range(3)]
    order, done = [], []
    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    used = [*weights, weights[-1]]  # the last one twice
    operands = [tuple(torch.randn(2, 5, 3, device=device)) for _ in used]
    for weight, (given, gradient) in reversed(list(zip(used, operands, strict=True))):  # as a backward pass does
        sides = [Operand(gradient), Operand(given)]
        halves.leave((0, 0), Product([weight], sides, lambda gradient, given: [gradient.t() @ given]))
    halves.add_weight_gradients((0, 0), (lambda left: done.append(len(left))) if one_by_one else None)
    products = [gradient.t() @ given for given, gradient in operands]
    for weight, expected in zip(weights, [*products[:2], products[2] + products[3]], strict=True):
        torch.testing.assert_close(weight.grad, expected)
    assert list(dict.fromkeys(order)) == [2, 1, 0]
    assert done == ([3, 2, 1, 0] if one_by_one else [])
    assert not halves._left
