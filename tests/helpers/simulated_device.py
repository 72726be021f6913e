"""GPUs of a job as queues of what the executor launches: whether every rank's work ends, and the cycle where not.

    compute      F0 ─┬──────── F1 ──────── wait ─ B0        a launch starts in the order of its queue, after its
    channel 0→1      └ isend F0 ─ isend F1                  stream's previous launch and the events it waits for
    queue        F0, isend F0, F1, isend F1, wait, B0       one for all streams, or one for each

A compute kernel ends once it starts. A point-to-point kernel ends once its match on the other rank has started, a
collective once every rank's has; a send that fits NCCL's buffers ends at once. What is behind a launch that cannot
start waits with it, on any stream of the same queue (CUDA_DEVICE_MAX_CONNECTIONS=1). Memory of messages is taken and
freed where the device passes that in the compute stream. Lists are walked by the real executor and the real
transports; `torch.distributed` beneath them is replaced, and tensors are on the meta device.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_dynapipe.core import instructions as ins
from megatron_dynapipe.core.memory import ELEMENT_BYTES, message_elements
from megatron_dynapipe.core.plan import IterationPlan, StagePlan
from megatron_dynapipe.runtime import (
    PipelineExecutor,
    PooledTransfers,
    ScatterGatherTransport,
    TorchTransport,
    Transport,
)
from megatron_dynapipe.runtime.messages import together
from megatron_dynapipe.runtime.process_groups import channels
from megatron_dynapipe.runtime.scatter_gather import IsSharded

COMPUTE = "compute"


class DeviceStallError(Exception):
    """Devices wait for one another; the message is the cycle."""


class DeviceMemoryError(Exception):
    """A device holds more bytes of messages during a pass than the plan counts."""


@dataclass(eq=False, slots=True)
class Launch:
    """One thing that a rank gives to its device."""

    rank: int
    name: str
    stream: Hashable
    after: tuple["Launch", ...] = ()  # launches whose events it waits for
    meets: tuple[Hashable, int] | None = None  # its peers on other ranks and their number; None where it ends by itself
    hidden: bool = False  # a send that NCCL's buffers take, so that it ends by itself
    of_device: bool = False  # waits for all before it on the device, and all after it wait
    takes: int = 0  # bytes of messages that are held from here on; negative where they are freed
    counted: int | None = None  # bytes of messages that the plan counts while this runs; None for what is no pass
    started: bool = False
    ended: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.name}"


@dataclass
class Device:
    """What one rank has launched."""

    rank: int
    buffer_bytes: int = 0
    launches: list[Launch] = field(default_factory=list)
    now: str = ""
    counts: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def launch(self, name: str, stream: Hashable, **about: Any) -> Launch:
        launched = Launch(self.rank, f"{self.now} ({name})", stream, **about)
        self.launches.append(launched)
        return launched

    def compute(self, name: str, counted: int | None = None) -> None:
        self.launch(name, COMPUTE, counted=counted)

    def take(self, size: int) -> None:
        self.launch(f"{size:+} bytes", COMPUTE, takes=size)

    def synchronize(self) -> None:
        self.launch("synchronize", COMPUTE, of_device=True)

    def meet(self, name: str, communicator: Hashable, ranks: int, *, hidden: bool = False) -> Launch:
        """A kernel of NCCL, on its communicator's stream, after what the compute stream was given before."""
        number = self.counts[communicator]
        self.counts[communicator] += 1
        before = next((each for each in reversed(self.launches) if each.stream == COMPUTE), None)
        after = () if before is None else (before,)
        return self.launch(name, communicator, after=after, meets=((communicator, number), ranks), hidden=hidden)

    def wait(self, launch: Launch) -> None:
        self.launch(f"wait for {launch.name}", COMPUTE, after=(launch,))


def run(devices: Sequence[Device], *, one_queue: bool = True) -> int:
    """Let all devices work off what they were given; the most bytes of messages that one holds during a pass.

    Devices that wait for one another, and a pass that finds more bytes than are counted, are errors.
    """
    meetings: dict[Hashable, list[Launch]] = defaultdict(list)
    queues: dict[tuple[int, Hashable], list[Launch]] = defaultdict(list)
    blocks: dict[Launch, Launch] = {}  # the launch of its stream before, and after which a device was waited for
    for device in devices:
        latest: dict[Hashable, Launch] = {}
        barrier: Launch | None = None
        for launch in device.launches:
            queues[device.rank, None if one_queue else launch.stream].append(launch)
            if launch.meets is not None:
                meetings[launch.meets[0]].append(launch)
            if launch.of_device:
                launch.after, barrier = tuple(latest.values()), launch
            elif barrier is not None:
                launch.after = (*launch.after, barrier)
            if (before := latest.get(launch.stream)) is not None:
                blocks[launch] = before
            latest[launch.stream] = launch
    return _Queues(queues, meetings, blocks).run()


@dataclass
class _Queues:
    queues: Mapping[tuple[int, Hashable], list[Launch]]
    meetings: Mapping[Hashable, list[Launch]]
    before: Mapping[Launch, Launch]
    at: dict[tuple[int, Hashable], int] = field(default_factory=lambda: defaultdict(int))
    held: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    most: int = 0

    def run(self) -> int:
        moved = True
        while moved:
            moved = False
            for key, queue in self.queues.items():
                while self.at[key] < len(queue) and self.waits_for(queue[self.at[key]]) is None:
                    self.start(queue[self.at[key]])
                    self.at[key] += 1
                    moved = True
        heads = [queue[self.at[key]] for key, queue in self.queues.items() if self.at[key] < len(queue)]
        heads += [each for queue in self.queues.values() for each in queue if each.started and not each.ended]
        if heads:
            raise DeviceStallError("; ".join(self.cycle(heads[0])))
        return self.most

    def start(self, launch: Launch) -> None:
        launch.started = True
        if launch.meets is None or launch.hidden:
            launch.ended = True
        if launch.meets is not None:
            key, ranks = launch.meets
            together = self.meetings[key]
            if len(together) == ranks and all(launched.started for launched in together):
                for launched in together:
                    launched.ended = True
        held = self.held[launch.rank] = self.held[launch.rank] + launch.takes
        if launch.counted is not None:
            self.most = max(self.most, held)
            if held > launch.counted:
                raise DeviceMemoryError(f"{launch} finds {held} bytes of messages, expected at most {launch.counted}")

    def waits_for(self, launch: Launch) -> Launch | None:
        """What keeps a queue's first launch from starting."""
        before = self.before.get(launch)
        if before is not None and not before.ended:
            return before
        return next((each for each in launch.after if not each.ended), None)

    def cycle(self, launch: Launch) -> list[str]:
        """From one launch that waits to what it waits for, until one repeats."""
        path: list[Launch] = []
        reasons: list[str] = []
        while launch not in path:
            path.append(launch)
            following, reason = self.next_of(launch)
            reasons.append(f"{launch} {reason} {following}" if following else f"{launch} {reason}")
            if following is None:
                return reasons
            launch = following
        return reasons[path.index(launch) :]

    def next_of(self, launch: Launch) -> tuple[Launch | None, str]:
        if not launch.started:
            (key,) = (key for key, queue in self.queues.items() if launch in queue[self.at[key] :])
            head = self.queues[key][self.at[key]]
            if head is not launch:
                return head, "is queued behind"
            return self.waits_for(launch), "waits for"
        assert launch.meets is not None
        together = self.meetings[launch.meets[0]]
        late = next((each for each in together if not each.started), None)
        return late, "has to meet" if late else "meets nothing"


@dataclass(frozen=True)
class _Group:
    """A process group: its ranks by global number, and this one's place."""

    name: Hashable
    ranks: Sequence[int]
    mine: int

    def rank(self) -> int:
        return self.ranks.index(self.mine)

    def size(self) -> int:
        return len(self.ranks)


class _Started:
    def __init__(self, device: Device, launch: Launch) -> None:
        self._device, self._launch = device, launch

    def wait(self, *_: object) -> None:
        self._device.wait(self._launch)


@contextlib.contextmanager
def _distributed(device: Device) -> Iterator[None]:
    """`torch.distributed`, of which every call launches on a device."""

    def transfer(kind: str) -> Callable[..., _Started]:
        def start(tensor: torch.Tensor, *, group: _Group, **peer: int) -> _Started:
            (place,) = peer.values()
            other = group.ranks[place]
            pair = (group.name, min(device.rank, other), max(device.rank, other))
            hidden = kind == "isend" and tensor.nbytes <= device.buffer_bytes
            launch = device.meet(f"{kind} of {tensor.nbytes} bytes, rank {other}", pair, 2, hidden=hidden)
            return _Started(device, launch)

        return start

    make, frees = torch.empty, list[Any]()

    def empty(*shape: Any, **about: Any) -> torch.Tensor:
        tensor = make(*shape, **about)
        if tensor.nbytes:
            device.take(tensor.nbytes)
            frees.append(weakref.finalize(tensor.untyped_storage(), device.take, -tensor.nbytes))
        return tensor

    def gather(_whole: torch.Tensor, _shard: torch.Tensor, *, group: _Group) -> None:
        device.wait(device.meet("all-gather", group.name, group.size()))

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(dist, "isend", transfer("isend")),
        mock.patch.object(dist, "irecv", transfer("irecv")),
        mock.patch.object(dist, "all_gather_into_tensor", gather),
        mock.patch.object(dist, "get_group_rank", lambda group, rank: group.ranks.index(rank)),
    ):
        yield
        for free in frees:  # what the list's end leaves goes when Python collects it
            free.detach()


class _Platform:
    """Names what is launched after the instruction that launches it."""

    device = torch.device("meta")

    def __init__(self, device: Device, plan: StagePlan) -> None:
        self._device, self._words = device, map(ins.format_instruction, plan.instructions)

    def align(self) -> None:
        pass

    def mark(self) -> Callable[[], int]:
        self._device.now = next(self._words, "end").partition("[")[0]
        return lambda: 0

    def has_passed(self, _mark: object) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.synchronize()

    def peak_bytes(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a plan's lists are run."""

    tensor: int = 1  # tensor-parallel ranks; each of their passes ends with a collective among them
    reduces: bool = True  # gradients over the replicas, at the list's end
    is_sharded: IsSharded | None = None  # which messages are divided over the tensor-parallel ranks; None for none
    buffer_bytes: int = 0  # a send of no more ends without its receive

    def launch(self, plan: IterationPlan) -> list[Device]:
        """What every rank's executor launches for an iteration: ranks of tensor, then replica, then stage."""
        return [
            self._rank(plan, stage, replica, tensor)
            for stage in range(plan.pipeline_stages)
            for replica in range(len(plan.replicas))
            for tensor in range(self.tensor)
        ]

    def _rank(self, plan: IterationPlan, stage: int, replica: int, tensor: int) -> Device:
        replicas, stages = len(plan.replicas), plan.pipeline_stages
        rank = (stage * replicas + replica) * self.tensor + tensor
        device = Device(rank, self.buffer_bytes)
        pipeline = [(s * replicas + replica) * self.tensor + tensor for s in range(stages)]
        groups: dict[ins.Channel, Any] = {
            channel: _Group((str(channel), replica, tensor), pipeline, rank)
            for channel in channels(stages, plan.chunks)
        }
        mine = plan.replicas[replica].stages[stage]
        with _distributed(device):
            transport: Transport = TorchTransport(groups, pipeline, deadline_s=1)
            if self.is_sharded is not None and self.tensor > 1:
                first = rank - tensor
                group: Any = _Group(("gather", stage, replica), range(first, first + self.tensor), rank)
                transport = ScatterGatherTransport(transport, group, stage=stage, is_sharded=self.is_sharded)
            platform = _Platform(device, mine)
            transfers = PooledTransfers(transport, platform.device, stages=stages, dtype=torch.bfloat16)
            executor = PipelineExecutor(transfers, platform)
            executor.execute(mine, self._handlers(plan, mine, device, replica))
            if self.reduces and replicas > 1 and not plan.forward_only:
                for chunk in range(plan.chunks):
                    device.wait(device.meet(f"reduce chunk {chunk}", ("replicas", stage, tensor, chunk), replicas))
        return device

    def _handlers(self, plan: IterationPlan, mine: StagePlan, device: Device, replica: int) -> Any:
        sends = {
            (ins.SENT_BUFFER[i.payload], i.micro_batch, i.chunk): i.shapes
            for i in mine.instructions
            if isinstance(i, ins.SendStart)
        }

        # Inputs that passes keep are among the messages here; plans of training count them with the passes.
        counted = (n * ELEMENT_BYTES for n in message_elements(mine.instructions, forward_only=True))

        def make(kind: ins.Buffer) -> Callable[[Any, Any], None]:
            def handle(run: ins.Forward | ins.Backward | ins.BackwardInput, buffers: Any) -> None:
                device.compute("compute", next(counted))
                if self.tensor > 1:
                    stage = ("tensor", mine.stage, replica)
                    device.wait(device.meet("all-reduce", stage, self.tensor))
                shapes = sends.get((kind, run.micro_batch, run.chunk))
                if shapes is not None:
                    made = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
                    buffers.put(kind, run.micro_batch, run.chunk, together(made))

            return handle

        def load(run: ins.Load, buffers: Any) -> None:
            device.compute("copy to the device")
            buffers.put(ins.Buffer.DATA, run.micro_batch, 0, None)

        def weights(_run: ins.BackwardWeight, _buffers: Any) -> None:
            device.compute("compute", next(counted))

        backward = make(ins.Buffer.INPUT_GRAD)
        passes = {
            ins.Forward: make(ins.Buffer.OUTPUT),
            ins.Backward: backward,
            ins.BackwardInput: backward,
            ins.BackwardWeight: weights,
        }
        return {ins.Load: load, **passes}


def check(plan: IterationPlan, job: Job, *, one_queue: bool = True) -> int:
    """Launch a plan's lists and let the devices work them off, as `run` does."""
    return run(job.launch(plan), one_queue=one_queue)
