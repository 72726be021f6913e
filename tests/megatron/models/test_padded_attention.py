"""Padded causal rows as cuDNN's kernel gets them, computed on a CPU; the kernel itself: `tests/rehearsal`."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dynapipe.megatron.models.padded_attention import attend_padded, cudnn_attention


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_padding_changes_no_result_and_no_gradient(length, groups):
    draw = torch.Generator().manual_seed(length)
    mixed = torch.randn(
        length, 3, 4 + 2 * groups, 8, generator=draw, requires_grad=True
    )  # parts of one tensor, as it is
    gradient = torch.randn(length, 3, 4, 8, generator=draw)
    results = []
    for padded in (True, False):
        query, key, value = mixed.split([4, groups, groups], dim=2)
        if padded:
            attended = attend_padded(query, key, value, scale=0.3)
        else:
            rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            attended = scaled_dot_product_attention(*rows, is_causal=True, scale=0.3, enable_gqa=True)
            attended = attended.permute(2, 0, 1, 3)
        results.append((attended, *torch.autograd.grad(attended, mixed, gradient)))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_cpu_has_no_such_kernel(capsys):
    assert cudnn_attention(torch.device("cpu"), torch.bfloat16, (4, 4), 128, 0.1) is None
    assert capsys.readouterr().out == ""
