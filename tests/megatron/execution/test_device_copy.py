import torch

from megatron_dynapipe.megatron.execution.step_functions import copy_buffer, copy_to

CPU = torch.device("cpu")
TENSORS = [torch.arange(3, dtype=torch.int32), None, torch.tensor([[0.5, 1.5, 2.5]])]


def test_nothing_is_copied_on_a_cpu():
    for tensor, same in zip(TENSORS, copy_to(CPU, TENSORS), strict=True):
        assert same is tensor


def test_tensors_of_one_buffer_are_copied_with_it():
    buffer = torch.zeros(64, dtype=torch.uint8)
    tokens = buffer[16:48].view(torch.int64).view(2, 2).copy_(torch.arange(4).view(2, 2))
    mask = buffer[48:56].view(torch.float32).copy_(torch.tensor([0.5, 2.0]))
    moved = copy_buffer(CPU, [mask, None, tokens])
    assert moved is not None and moved[1] is None
    assert torch.equal(moved[0], mask) and torch.equal(moved[2], tokens)
    tokens.zero_()
    assert moved[2].tolist() == [[0, 1], [2, 3]], "a copy, not the buffer"
    assert copy_buffer(CPU, TENSORS) is None and copy_buffer(CPU, [None]) is None
