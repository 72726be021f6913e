"""A message's tensors in one stretch of memory, and the buffers that messages lie in."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.core.executor import BufferTable
from megatron_dynapipe.core.instructions import Buffer, Forward
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.runtime import CpuPlatform, PipelineExecutor, PooledTransfers
from megatron_dynapipe.runtime.messages import MessageBuffers, in_place, joined, landing, message_bytes, views
from megatron_dynapipe.runtime.transport import JoinedWork
from tests.helpers.lists import parse_instruction

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


def test_a_message_is_sent_from_the_pool_and_what_made_it_is_dropped(capsys):
    """Several tensors lie as one; sends that are known to be complete give their buffer to the next."""
    sent: list[list[torch.Tensor]] = []
    transport = SimpleNamespace(start_send=lambda _channel, _stage, tensors: sent.append(tensors) or JoinedWork([]))
    platform = CpuPlatform()
    transfers = PooledTransfers(transport, platform.device, stages=3, dtype=torch.float32)
    executor, made = PipelineExecutor(transfers, platform), []

    def forward(step: Forward, buffers: BufferTable) -> None:
        tensors = [torch.full((3,), 2.0 + step.micro_batch), torch.full((5,), 3.0)]
        made.append(weakref.ref(tensors[0]))
        buffers.put(Buffer.OUTPUT, step.micro_batch, 0, tensors)

    executor.register_handler(Forward, forward)
    words = [f"F{row} SEND_F{row}>2[3,5] WAIT_SEND_F{row}>2 FREE_OUTPUT{row}" for row in range(2)]
    instructions = tuple(parse_instruction(word) for word in " ".join(words).split())
    plan = StagePlan(stage=1, instructions=instructions, predicted=())
    keeps = transport.start_send
    transport.start_send = lambda *_: JoinedWork([])
    executor.execute(plan)
    assert capsys.readouterr().err == ""
    made.clear()
    transport.start_send = keeps
    executor.execute(plan)
    assert "warning: messages took 2 buffers (OUTPUT) where the plan counts 1" in capsys.readouterr().err
    assert [ref() for ref in made] == [None, None]
    (whole,) = {in_place(tensors).data_ptr() for tensors in sent[:1]}
    assert in_place(sent[1]).data_ptr() != whole  # the first is still referred to here
    assert [[tensor.tolist() for tensor in tensors] for tensors in sent] == [
        [[number] * 3, [3.0] * 5] for number in (2.0, 3.0)
    ]


def test_a_buffer_is_used_again_when_nothing_refers_to_it():
    pool = MessageBuffers(torch.device("cpu"))
    pool.begin(64)
    first = pool.take().view(torch.float32)
    second = pool.take().view(torch.float32)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first
    assert pool.take().data_ptr() in places - {second.data_ptr()}
    kept = (second.detach().requires_grad_() * second.detach()).sum()  # its graph keeps the buffer
    del second
    again = pool.take(), pool.take()
    assert kept.requires_grad and len({buffer.data_ptr() for buffer in again}) == 1
    for size in (8, 80):
        pool.begin(size)
        assert pool.take().nbytes == size
