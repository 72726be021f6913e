"""The instruction loop on one process: what handlers see, what is refused, what a failure says and leaves behind."""

import itertools
import weakref
from collections.abc import Sequence

import msgspec
import pytest
import torch

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.core.executor import Trace
from megatron_dynapipe.core.instructions import Backward, Buffer, Channel, Forward, Load, RecvStart, format_instruction
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.runtime import BufferTable, CpuPlatform, PipelineExecutor, PooledTransfers, Work
from tests.helpers.lists import parse_stages


class Loopback:
    """A transport whose messages come back from where they were sent: channel after channel, first in first out."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sent: list[Sequence[torch.Tensor]] = []

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        self.log.append(f"send {channel.payload.name} > {stage}")
        self.sent.append([tensor.clone() for tensor in tensors])
        return _Done()

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        self.log.append(f"recv {channel.payload.name} < {stage}")
        for tensor in tensors:
            tensor.fill_(7.0)
        return _Done()


class _Done:
    def wait(self) -> None:
        pass


def plan(words: str, stage: int = 0) -> StagePlan:
    lines = "\n".join([f"stage {before}:" for before in range(stage)] + [f"stage {stage}: {words}"])
    return StagePlan(stage=stage, instructions=parse_stages(lines)[stage], predicted=())


def bare_executor(transport: Loopback | None = None) -> PipelineExecutor:
    platform = CpuPlatform()
    transfers = PooledTransfers(transport or Loopback(), platform.device, stages=2, dtype=torch.float32)
    return PipelineExecutor(transfers, platform)


def executor(ran: list[str], transport: Loopback | None = None) -> PipelineExecutor:
    """Handlers that make what they should and write down what ran."""
    made = bare_executor(transport)

    def load(instruction: Load, buffers: BufferTable) -> None:
        ran.append(format_instruction(instruction))
        buffers.put(Buffer.DATA, instruction.micro_batch, 0, "tokens")

    def forward(instruction: Forward, buffers: BufferTable) -> None:
        ran.append(format_instruction(instruction))
        assert buffers.get(Buffer.DATA, instruction.micro_batch, 0) == "tokens"
        buffers.put(Buffer.OUTPUT, instruction.micro_batch, 0, (torch.full((2, 3), 1.0 + instruction.micro_batch),))

    def backward(instruction: Backward, buffers: BufferTable) -> None:
        ran.append(format_instruction(instruction))
        assert buffers.tensors(Buffer.OUTPUT_GRAD, instruction.micro_batch, 0)[0].eq(7.0).all()

    made.register_handler(Load, load)
    made.register_handler(Forward, forward)
    made.register_handler(Backward, backward)
    return made


ROUND = (
    "LOAD0 F0 FREE_DATA0 SEND_F0>1[2x3] RECV_B0<1[2x3] WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 FREE_OUTPUT_GRAD0"
)


def test_instructions_run_in_order_and_leave_nothing():
    ran: list[str] = []
    transport = Loopback()
    trace = executor(ran, transport).execute(plan(ROUND))
    assert ran == ["LOAD0", "F0", "B0"]
    assert transport.log == ["send ACTIVATION > 1", "recv GRADIENT < 1"]
    assert transport.sent[0][0].eq(1.0).all()
    events = trace.events()
    assert [format_instruction(event.instruction).partition("[")[0] for event in events] == [
        word.partition("[")[0] for word in ROUND.split()
    ]
    assert all(event.start_ns <= event.end_ns for event in events)
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(events))
    assert executor([]).execute(plan("")).events() == ()


def test_instructions_are_ranges_to_a_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        executor([]).execute(plan(ROUND))
    names = {event.name for event in profiler.events()}
    assert {"F0", "B0"} <= names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pass
    executor([]).execute(plan(ROUND))
    assert "F0" not in {event.name for event in profiler.events()}


def test_a_message_without_tensors_is_not_sent():
    """The stage before one that trains nothing gets no gradients; a transport cannot send none."""
    transport = Loopback()
    made = executor([], transport)
    made.register_handler(Backward, lambda instruction, buffers: None)
    lists = plan(ROUND)
    empty = [msgspec.structs.replace(i, shapes=()) if isinstance(i, RecvStart) else i for i in lists.instructions]
    made.execute(StagePlan(stage=0, instructions=tuple(empty), predicted=()))
    assert transport.log == ["send ACTIVATION > 1"]


def test_a_freed_output_is_gone_at_once():
    made = executor([])
    outputs: list[weakref.ref[torch.Tensor]] = []

    def forward(instruction: Forward, buffers: BufferTable) -> None:
        tensor = torch.ones(2, 3)
        outputs.append(weakref.ref(tensor))
        buffers.put(Buffer.OUTPUT, instruction.micro_batch, 0, (tensor,))

    def load(instruction: Load, buffers: BufferTable) -> None:
        if instruction.micro_batch == 1:
            assert outputs[0]() is None
        buffers.put(Buffer.DATA, instruction.micro_batch, 0, None)

    made.register_handler(Forward, forward)
    made.register_handler(Load, load)
    made.execute(plan("LOAD0 F0 FREE_DATA0 SEND_F0>1[2x3] WAIT_SEND_F0>1 FREE_OUTPUT0 LOAD1 FREE_DATA1"))
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("LOAD0", "no buffer to be held at the end of the instruction list, got DATA of micro-batch 0"),
        ("LOAD0 LOAD0", "DATA of micro-batch 0 to be free before it is made again"),
        ("F0", "DATA of micro-batch 0 to be held, but it is not"),
        ("FREE_INPUT3.1", "INPUT of micro-batch 3 on chunk 1 to be held, but it is not"),
        ("LOAD0 F0 SEND_F0>1[2x4]", r"expected to send tensors of shapes \(\(2, 4\),\), got \(\(2, 3\),\)"),
        ("WAIT_SEND_F0>1", "WAIT_SEND_F0>1 waits for a send that was not started"),
        ("WAIT_RECV_B0<1", "WAIT_RECV_B0<1 waits for a receive that was not started"),
        ("RECV_B0<1[1]", "every transfer to be waited for, got GRADIENT of micro-batch 0 unfinished"),
    ],
)
def test_a_list_that_cannot_run_is_refused(words, said):
    with pytest.raises(ExecutionError, match=said):
        executor([]).execute(plan(words))


def test_a_message_has_the_type_that_the_other_stage_receives():
    """bf16 states sent to a stage that allocates fp32 would arrive as half of other numbers."""

    def forward(instruction: Forward, buffers: BufferTable) -> None:
        buffers.put(Buffer.OUTPUT, instruction.micro_batch, 0, (torch.ones(2, 3, dtype=torch.bfloat16),))

    with pytest.raises(ExecutionError, match=r"to send tensors of torch.float32, .*, got torch.bfloat16") as refused:
        executor([]).execute(plan("LOAD0 F0 SEND_F0>1[2x3]"), {Forward: forward})
    assert "step 2: LOAD0 F0 --> SEND_F0" in refused.value.__notes__[0]


def test_an_instruction_without_a_handler_is_refused_before_anything_runs_and_a_handler_without_one():
    made = bare_executor()
    made.register_handler(Load, lambda instruction, buffers: pytest.fail("ran"))
    with pytest.raises(ExecutionError, match="no handler is registered for Backward, Forward"):
        made.execute(plan("LOAD0 F0 B0"))

    with pytest.raises(ExecutionError, match="expected one of the instruction types Load, Forward"):
        made.register_handler(int, lambda instruction, buffers: None)


def test_a_failing_handler_keeps_its_exception_and_gains_its_place():
    made = executor([])

    def fail(instruction: Backward, buffers: BufferTable) -> None:
        raise ZeroDivisionError("of the handler")

    made.register_handler(Backward, fail)
    with pytest.raises(ZeroDivisionError, match="of the handler") as raised:
        made.execute(plan(ROUND))
    assert "at stage 0, step 8:" in raised.value.__notes__[0]
    assert "--> B0 <--" in raised.value.__notes__[0]
    made.register_handler(Backward, lambda instruction, buffers: None)
    made.execute(plan(ROUND))  # what the failed iteration held does not stand in the way of the next


def test_a_span_reads_two_marks(monkeypatch):
    """Events of all instructions are built where they are recorded; on a GPU each takes a call of the driver."""
    read = []
    numbers = itertools.count()

    def mark(_platform):
        number = next(numbers)
        return lambda: read.append(number) or number * 100

    monkeypatch.setattr(CpuPlatform, "mark", mark)
    trace = Trace(CpuPlatform())
    for micro_batch in range(5):
        trace.add(Forward(micro_batch))
    assert trace.span_ns() == 500 and sorted(read) == [0, 5]
