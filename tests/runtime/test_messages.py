"""A message's tensors in one stretch of memory, and the buffers that messages are received into."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.plan.instructions import Backward, Buffer, Forward, Payload
from megatron_dynapipe.runtime.executor import BufferTable
from megatron_dynapipe.runtime.messages import ReceiveBuffers, in_place, joined, landing, message_bytes, views
from megatron_dynapipe.runtime.passes import PassContext, pass_handlers

SHAPES = [(3, 5), (7,), (0, 2), (2, 2, 3), ()]
DTYPES = [torch.bfloat16, torch.int64, torch.float32, torch.bool, torch.float64]


def some() -> list[torch.Tensor]:
    return [torch.randint(0, 2, shape).to(dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


def test_a_received_message_is_sent_on_in_place():
    buffer = torch.zeros(message_bytes(SHAPES, DTYPES) + 9, dtype=torch.uint8)
    tensors = views(buffer, SHAPES, DTYPES)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == list(zip(SHAPES, DTYPES, strict=True))
    whole = joined([tensor.detach() for tensor in tensors])
    assert whole.data_ptr() == buffer.data_ptr() and whole.nbytes == message_bytes(SHAPES, DTYPES)
    same, unpack = landing(tensors)
    assert same.data_ptr() == buffer.data_ptr() and unpack is None
    assert in_place(list(reversed(tensors))) is None


@pytest.mark.parametrize(
    "tensors",
    [
        some(),
        [torch.rand(4, 6).t()],
        [torch.rand(8, 3)[:, 1]],
        [torch.rand(2, 3, 4, 5).permute(0, 2, 3, 1)],
        [torch.rand(())],
    ],
    ids=["apart", "transposed", "a column", "channels last", "a scalar"],
)
def test_what_lies_apart_is_copied(tensors):
    """Sending the memory of a transposed tensor would send its elements in another order."""
    message = joined(tensors)
    assert message.is_contiguous()
    arrived = [torch.empty_like(tensor) for tensor in tensors]
    landed, unpack = landing(arrived)
    landed.copy_(message)
    if unpack is not None:
        unpack()
    assert all(one.equal(other) for one, other in zip(arrived, tensors, strict=True))


def test_passes_make_a_message_as_it_is_sent():
    """Tensors of several that are copied only when they are sent would be held beside their copies."""
    model = SimpleNamespace(begin_pass=lambda _: None, differentiable=lambda *_: None, scale_loss=None)
    model.forward = lambda _row, _chunk, received, _data: [2 * received[0], 3 * received[1]]
    handlers, buffers = pass_handlers(PassContext(model=model, stage=1, stages=3, chunks=1)), BufferTable()
    buffers.put(Buffer.DATA, 0, 0, None)
    for kind in (Buffer.INPUT, Buffer.OUTPUT_GRAD):
        buffers.put(kind, 0, 0, [torch.ones(3), torch.ones(5)])
    for run, made in ((Forward(0), Buffer.OUTPUT), (Backward(0), Buffer.INPUT_GRAD)):
        handlers[type(run)](run, buffers)
        tensors = buffers.tensors(made, 0, 0)
        assert [tensor.tolist() for tensor in tensors] == [[2] * 3, [3] * 5]
        assert in_place(tensors) is not None


def test_a_buffer_is_used_again_when_nothing_refers_to_it():
    pool = ReceiveBuffers(torch.device("cpu"))
    pool.expect({Payload.ACTIVATION: 64})
    first = pool.take(Payload.ACTIVATION).view(torch.float32)
    second = pool.take(Payload.ACTIVATION).view(torch.float32)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first
    assert pool.take(Payload.ACTIVATION).data_ptr() in places - {second.data_ptr()}
    kept = (second.detach().requires_grad_() * second.detach()).sum()  # its graph keeps the buffer
    del second
    again = pool.take(Payload.ACTIVATION), pool.take(Payload.ACTIVATION)
    assert kept.requires_grad and len({buffer.data_ptr() for buffer in again}) == 1
    pool.expect({Payload.ACTIVATION: 60})
    assert pool.take(Payload.ACTIVATION).nbytes == 64
    for size in (8, 80):
        pool.expect({Payload.ACTIVATION: size})
        assert pool.take(Payload.ACTIVATION).nbytes == size
