"""List scheduling as its rules read (`core.orders`), a pass at a time: an oracle."""

from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.native import NEVER, PassOrder
from megatron_dynapipe.core.orders import Policy, Rule, forwards_of_earlier_chunks, order_of, sequences
from megatron_dynapipe.core.problem import ScheduleProblem


def list_schedule_by_rules(problem: ScheduleProblem, policy: Policy) -> PassOrder | None:
    """The order of `list_schedule`."""
    run = _Run(problem, policy)
    taken = run.run()
    return None if taken is None else order_of(taken, problem, policy.rule)


class _Stage:
    """One stage's progress: passes that have run, and the one to run next."""

    def __init__(self, held: int) -> None:
        self.taken: list[int] = []
        self.forwards = self.backwards = self.free = 0
        self.held = held
        self.start = NEVER
        self.next_is_forward = True


class _Run:
    def __init__(self, problem: ScheduleProblem, policy: Policy) -> None:
        self.problem, self.rule = problem, policy.rule
        count, stages, chunks = problem.micro_batches, problem.stages, problem.chunks
        self.stages = [_Stage(held) for held in problem.model_state_bytes.tolist()]
        full = policy.rule is not Rule.BACKWARD_FIRST
        self.forwards, self.backwards = sequences(count, stages, chunks, full=full)
        more = forwards_of_earlier_chunks(count, stages, chunks, full=full)
        self.depths = [depth + more for depth in policy.depths]
        self.input_ready = {(row, 0): 0 for row in range(count)}
        self.gradient_ready: dict[tuple[int, int], int] = {}
        """(micro-batch, virtual stage) → when it is there."""

    def run(self) -> list[list[int]] | None:
        """1 per forward and 0 per backward of each stage; None where one cannot go on."""
        problem = self.problem
        if (problem.model_state_bytes.max() + problem.peak_bytes > problem.memory_limit_bytes).any():
            return None  # all stages hold as much model state here
        for _ in range(problem.micro_batches * problem.virtual_stages * (1 if problem.forward_only else 2)):
            for stage in range(problem.stages):
                self.choose(stage)
            stage = min(range(problem.stages), key=lambda stage: self.stages[stage].start)
            if self.stages[stage].start >= NEVER:
                return None
            self.step(stage)
        return [stage.taken for stage in self.stages]

    def choose(self, stage: int) -> None:
        """Set what a stage runs next, as far as it can know."""
        at, problem = self.stages[stage], self.problem
        forward = backward = NEVER
        admitted = False
        if at.forwards < len(self.forwards):
            row, v = self.place(stage, self.forwards[at.forwards])
            admitted = problem.forward_only or (
                at.forwards - at.backwards < self.depths[stage]
                and at.held + self.needed(stage, row, v) <= problem.memory_limit_bytes
            )
            if admitted and (row, v) in self.input_ready:
                forward = max(at.free, self.input_ready[row, v])
        waits = admitted and self.rule is Rule.STRICT
        if at.backwards < len(self.backwards) and not waits:
            place = self.place(stage, self.backwards[at.backwards])
            if place in self.gradient_ready:
                backward = max(at.free, self.gradient_ready[place])
        at.next_is_forward = forward < backward or (forward == backward and self.rule is Rule.FORWARD_FIRST)
        at.start = min(forward, backward)

    def needed(self, stage: int, row: int, v: int) -> int:
        """What the next forward adds: its peak, and room for any backward beside it, if one may be next."""
        at, problem = self.stages[stage], self.problem
        peak = int(problem.peak_bytes[row, v])
        if at.forwards == at.backwards:
            return peak
        above = (problem.peak_bytes - problem.stored_bytes)[:, stage :: problem.stages].max()
        room = int(above) if problem.peak_covers_backward else 0
        return max(peak, int(problem.stored_bytes[row, v]) + room)

    def place(self, stage: int, step: Pass) -> tuple[int, int]:
        """(micro-batch, virtual stage) of a stage's pass."""
        return step.micro_batch, step.chunk * self.problem.stages + stage

    def step(self, stage: int) -> None:
        """Run a stage's next pass."""
        at, problem = self.stages[stage], self.problem
        at.taken.append(int(at.next_is_forward))
        if at.next_is_forward:
            row, v = self.place(stage, self.forwards[at.forwards])
            at.forwards += 1
            at.free = at.start + int(problem.forward_ns[row, v])
            at.held += 0 if problem.forward_only else int(problem.stored_bytes[row, v])
            if v + 1 < problem.virtual_stages:
                self.input_ready[row, v + 1] = at.free + int(problem.forward_transfer_ns[row, v])
            elif not problem.forward_only:
                self.gradient_ready[row, v] = at.free
            return
        row, v = self.place(stage, self.backwards[at.backwards])
        at.backwards += 1
        at.free = at.start + int(problem.backward_ns[row, v])
        at.held -= int(problem.stored_bytes[row, v])
        if v > 0:
            self.gradient_ready[row, v - 1] = at.free + int(problem.backward_transfer_ns[row, v])
