"""Verify: transfers pair up over all ranks, in equal shapes and order, and never deadlock.

Channels are rendezvous channels, one FIFO per channel and pair of ranks: a send is complete once its receive has
been started, a receive once its send has been started. Starting blocks nobody, so a list stands still only at waits,
and a wait ends when the peer's list has passed one known step. The replay moves every list as far as it can go.
"""

from collections.abc import Sequence
from itertools import zip_longest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Payload, SendStart, TensorShape, point_at
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.core.verify_buffers import Dimensions, StageTrace, TransferEnd, Wait


def check_pairing(dimensions: Dimensions, traces: Sequence[StageTrace]) -> None:
    """Raise a PlanError where the n-th send of a channel is not what its receiver receives n-th."""
    for sender in traces:
        for payload, sends in sender.sends.items():
            peer = _peer(dimensions, sender.stage, payload, sending=True)
            receiver = traces[peer]
            pairs = zip_longest(sends, receiver.receives[payload])
            for number, (send, receive) in enumerate(pairs):
                if send is None or receive is None or _differ(send, receive):
                    raise PlanError(
                        f"transfer {number} of {payload.name.lower()}s from stage {sender.stage} to {receiver.stage}: "
                        f"sent is {_describe(sender, send)}, received is {_describe(receiver, receive)}"
                    )


def check_progress(dimensions: Dimensions, traces: Sequence[StageTrace]) -> None:
    """Raise a PlanError that shows the cycle where ranks would wait for each other for ever."""
    targets = [[_target(dimensions, traces, trace.stage, wait) for wait in trace.waits] for trace in traces]
    done = [0] * len(traces)
    reached = [_next_wait(trace, 0) for trace in traces]
    moved = True
    while moved:
        moved = False
        for stage, trace in enumerate(traces):
            before = done[stage]
            for peer, step in targets[stage][before:]:
                if reached[peer] <= step:
                    break
                done[stage] += 1
                reached[stage] = _next_wait(trace, done[stage])
            moved = moved or done[stage] > before
    stuck = [stage for stage, trace in enumerate(traces) if done[stage] < len(trace.waits)]
    if stuck:
        raise PlanError("the plan stalls: " + _cycle(traces, targets, done, stuck[0]))


def check_shapes(plan: IterationPlan, replica: ReplicaPlan, sends: Sequence[Sequence[int]]) -> None:
    """Raise a PlanError where a tensor's shape is not its micro-batch's, or a gradient's not its activation's.

    Every boundary passes [input length / p, size, hidden], or that and [target length / p, size, hidden], with one
    hidden size and one sequence-parallel size p in the whole plan.

    `sends` are the steps of each rank's starts of sends; their receives have the same shapes.
    """
    first = _first_send(replica, sends)
    if first is None:
        return
    if not first.shapes or len(first.shapes[0]) != 3 or min(first.shapes[0]) < 1:
        raise PlanError(f"expected tensors of three dimensions of at least 1, got {first.shapes}")
    length, _, hidden = first.shapes[0]
    whole = replica.micro_batches[first.micro_batch].shape
    parallel = max(whole.input_length // length, 1)
    allowed = [_allowed(micro_batch.shape, parallel, hidden) for micro_batch in replica.micro_batches]
    crossing: dict[int, int] = {}
    for rank, steps in enumerate(sends):
        instructions = replica.stages[rank].instructions
        for step in steps:
            send = instructions[step]
            assert isinstance(send, SendStart)
            boundary = send.chunk * plan.pipeline_stages + rank
            if send.payload is Payload.GRADIENT:
                boundary -= 1
            tensors = crossing.setdefault(boundary, len(send.shapes))
            if len(send.shapes) != tensors or allowed[send.micro_batch].get(tensors) != send.shapes:
                shape = replica.micro_batches[send.micro_batch].shape
                raise PlanError(
                    f"stage {rank}, step {step}: the {send.payload.name.lower()}s of a micro-batch of shape {shape} "
                    f"cannot be {send.shapes}, at {point_at(instructions, step)}"
                )
    counts = [crossing[boundary] for boundary in sorted(crossing)]
    if counts != sorted(counts):
        raise PlanError(f"expected boundaries after the first decoder layer to pass both tensors, got {counts}")


def _first_send(replica: ReplicaPlan, sends: Sequence[Sequence[int]]) -> SendStart | None:
    for stage, steps in zip(replica.stages, sends, strict=True):
        if steps:
            send = stage.instructions[steps[0]]
            assert isinstance(send, SendStart)
            return send
    return None


def _allowed(shape: Shape, parallel: int, hidden: int) -> dict[int, tuple[TensorShape, ...]]:
    """Shapes that may cross a boundary, by the number of tensors."""
    inputs = (shape.input_length // parallel, shape.size, hidden)
    if not shape.target_length:
        return {1: (inputs,)}
    targets = (shape.target_length // parallel, shape.size, hidden)
    return {1: (inputs,), 2: (inputs, targets)}


def _peer(dimensions: Dimensions, stage: int, payload: Payload, *, sending: bool) -> int:
    downstream = (payload is Payload.ACTIVATION) == sending
    return (stage + (1 if downstream else -1)) % dimensions.stages


def _differ(send: TransferEnd, receive: TransferEnd) -> bool:
    return send.micro_batch != receive.micro_batch or send.boundary != receive.boundary or send.shapes != receive.shapes


def _describe(trace: StageTrace, end: TransferEnd | None) -> str:
    if end is None:
        return "nothing"
    return f"{point_at(trace.instructions, end.step, around=1)} (step {end.step})"


def _next_wait(trace: StageTrace, number: int) -> int:
    """The step at which a list stands once `number` of its waits are over: its next wait, or its end."""
    if number == len(trace.waits):
        return len(trace.instructions)
    return trace.waits[number].step


def _target(dimensions: Dimensions, traces: Sequence[StageTrace], stage: int, wait: Wait) -> tuple[int, int]:
    """(peer, step of its list that must have run) for a wait to end."""
    peer = _peer(dimensions, stage, wait.payload, sending=wait.sending)
    others = traces[peer].receives if wait.sending else traces[peer].sends
    return peer, others[wait.payload][wait.number].step


def _cycle(traces: Sequence[StageTrace], targets: list[list[tuple[int, int]]], done: list[int], start: int) -> str:
    """Follow the waits from one stuck stage until one repeats; name every wait of the cycle."""
    path: list[int] = []
    stage = start
    while stage not in path:
        path.append(stage)
        stage = targets[stage][done[stage]][0]
    links = []
    for waiting in path[path.index(stage) :]:
        number = done[waiting]
        peer, step = targets[waiting][number]
        trace = traces[waiting]
        at = point_at(trace.instructions, trace.waits[number].step, around=2)
        goal = point_at(traces[peer].instructions, step, around=0)
        links.append(f"stage {waiting} at {at} waits for stage {peer} to reach {goal} (step {step})")
    return "; ".join(links)
