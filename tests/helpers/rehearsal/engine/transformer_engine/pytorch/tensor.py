"""Quantised tensors, of which there are none."""

import torch


class QuantizedTensor(torch.Tensor):
    """What Megatron asks of a tensor whether it is one."""
