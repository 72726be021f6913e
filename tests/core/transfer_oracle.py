"""What instruction lists take when starts of transfers are instructions that may wait; written without the planner's.

Ranks run their lists in turn, each as far as it can. A message is under way once its send and its receive have been
started, and has arrived its transfer time later.
"""

from dataclasses import dataclass

from megatron_dynapipe.core import instructions as ins


class ListsStallError(Exception):
    """Ranks wait for one another."""


@dataclass
class Message:
    duration: int
    sent: int | None = None
    posted: int | None = None

    @property
    def arrival(self) -> int | None:
        return None if None in (self.sent, self.posted) else max(self.sent, self.posted) + self.duration


def pass_ns(problem, instruction, stage):
    at = instruction.micro_batch, stage
    whole, weight = int(problem.backward_ns[at]), int(problem.weight_ns[at])
    times = {ins.Forward: int(problem.forward_ns[at]), ins.Backward: whole, ins.BackwardInput: whole - weight}
    return times.get(type(instruction), weight)


def run_lists(problem, lists, *, ordered_starts):
    """Per rank (pass, start, end); raises ListsStallError."""
    stages = len(lists)
    messages: dict[tuple[int, ins.Payload, int], Message] = {}
    kinds = [(kind, payload) for kind in ("sent", "posted", "waited") for payload in ins.Payload]
    counts = [dict.fromkeys(kinds, 0) for _ in lists]
    numbers = [{} for _ in range(stages)]  # (payload, micro-batch, chunk) of a send -> its number
    events, at, clock = [[] for _ in lists], [0] * stages, [0] * stages

    def message(sender, payload, number):
        return messages.setdefault((sender, payload, number), Message(0))

    def step(rank, instruction):
        """The time after it, or None where it waits for another rank."""
        now = clock[rank]
        match instruction:
            case ins.Forward() | ins.Backward() | ins.BackwardInput() | ins.BackwardWeight():
                end = now + pass_ns(problem, instruction, instruction.chunk * stages + rank)
                events[rank].append((instruction, now, end))
                return end
            case ins.SendStart(payload=payload):
                number = counts[rank]["sent", payload]
                if ordered_starts and number:
                    before = message(rank, payload, number - 1).arrival
                    if before is None:
                        return None
                    now = max(now, before)
                activation, stage = payload is ins.Payload.ACTIVATION, instruction.chunk * stages + rank
                times = problem.forward_transfer_ns if activation else problem.backward_transfer_ns
                sent = message(rank, payload, number)
                sent.sent, sent.duration = now, int(times[instruction.micro_batch, stage])
                numbers[rank][payload, instruction.micro_batch, instruction.chunk] = number
                counts[rank]["sent", payload] += 1
            case ins.RecvStart(payload=payload, peer=peer):
                message(peer, payload, counts[rank]["posted", payload]).posted = now
                counts[rank]["posted", payload] += 1
            case ins.RecvWait(payload=payload, peer=peer):
                arrival = message(peer, payload, counts[rank]["waited", payload]).arrival
                if arrival is None:
                    return None
                counts[rank]["waited", payload] += 1
                now = max(now, arrival)
            case ins.SendWait(payload=payload):
                number = numbers[rank][payload, instruction.micro_batch, instruction.chunk]
                arrival = message(rank, payload, number).arrival
                if arrival is None:
                    return None
                now = max(now, arrival)
        return now

    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(lists):
            while at[rank] < len(instructions) and (after := step(rank, instructions[at[rank]])) is not None:
                clock[rank], at[rank], moved = after, at[rank] + 1, True
    if any(at[rank] < len(instructions) for rank, instructions in enumerate(lists)):
        raise ListsStallError
    return events
