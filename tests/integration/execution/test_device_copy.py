import torch

from megatron_dynapipe.integration.execution.device_copy import copy_to, copy_together

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(3, dtype=torch.int32),
    torch.arange(8).view(2, 4),
    None,
    torch.tensor([[0.5, 1.5, 2.5]]),
    torch.zeros(0, dtype=torch.int64),
    torch.tensor([1.0], dtype=torch.float64),
]


def test_tensors_come_out_of_one_buffer_as_they_went_in():
    moved = copy_together(CPU, TENSORS)
    for tensor, copy in zip(TENSORS, moved, strict=True):
        if tensor is None:
            assert copy is None
        else:
            assert copy is not None and copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in moved if copy is not None}) == 1
    assert copy_together(CPU, [None, None]) == [None, None]


def test_nothing_is_copied_on_a_cpu():
    for tensor, same in zip(TENSORS, copy_to(CPU, TENSORS), strict=True):
        assert same is tensor
