"""The rules of `core.simulate` in Python, by which the native core's simulation is checked."""

from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    format_instruction,
)
from megatron_dynapipe.core.native import PassOrder
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.simulate import Simulation


def simulate_in_python(problem: ScheduleProblem, order: PassOrder) -> Simulation:
    """`simulate` by the default rules of transfers, also of orders that leave passes out on a stage."""
    run = _Run(problem)
    position = [0] * problem.stages
    events: list[list[Event]] = [[] for _ in range(problem.stages)]
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(order):
            while position[stage] < len(passes) and (event := run.attempt(stage, passes[position[stage]])):
                events[stage].append(event)
                position[stage] += 1
                moved = True
    stuck = [stage for stage in range(problem.stages) if position[stage] < len(order[stage])]
    if stuck:
        at = ", ".join(f"stage {stage} at {format_instruction(order[stage][position[stage]])}" for stage in stuck)
        raise PlanningError(f"the pass order stalls: {at}")
    return Simulation(
        timeline=tuple(map(tuple, events)),
        makespan_ns=max(run.free_ns, default=0),
        busy_ns=tuple(sum(e.end_ns - e.start_ns for e in stage_events) for stage_events in events),
        peak_bytes=tuple(run.peak_bytes),
    )


class _Run:
    """State of a simulation: when each stage is free, what it holds, and when each message arrives."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        self.free_ns = [0] * problem.stages
        self.held_bytes: list[int] = problem.model_state_bytes.tolist()
        self.peak_bytes = list(self.held_bytes)
        self.arrival_ns: dict[tuple[bool, int, int], int] = {}
        """(forward?, micro-batch, virtual stage) → when its input is there; first stages' inputs are there at 0."""
        self.halved: set[tuple[int, int]] = set()
        """(micro-batch, virtual stage) whose first half has run, and the second has not."""

    def attempt(self, stage: int, step: Pass) -> Event | None:
        """Run one pass if its input has been made; None otherwise."""
        row, v = step.micro_batch, step.chunk * self.problem.stages + stage
        ready = self._ready(step, row, v)
        if ready is None:
            return None
        start = max(self.free_ns[stage], ready)
        end = start + self._duration(step, row, v)
        self.free_ns[stage] = end
        self._hold(step, stage, row, v)
        if not isinstance(step, BackwardWeight):
            self._send(row, v, isinstance(step, Forward), end)
        return Event(step, start, end)

    def _ready(self, step: Pass, row: int, v: int) -> int | None:
        """When what the pass needs is there; None while that is not known."""
        match step:
            case Forward():
                return 0 if v == 0 else self.arrival_ns.get((True, row, v))
            case Backward() | BackwardInput():
                return self.arrival_ns.get((False, row, v)) if (True, row, v + 1) in self.arrival_ns else None
            case BackwardWeight():
                return 0 if (row, v) in self.halved else None

    def _duration(self, step: Pass, row: int, v: int) -> int:
        whole, weight = int(self.problem.backward_ns[row, v]), int(self.problem.weight_ns[row, v])
        match step:
            case Forward():
                return int(self.problem.forward_ns[row, v])
            case Backward():
                return whole
            case BackwardInput():
                return whole - weight
            case BackwardWeight():
                return weight

    def _hold(self, step: Pass, stage: int, row: int, v: int) -> None:
        forward, first = isinstance(step, Forward), isinstance(step, BackwardInput)
        stored = 0 if self.problem.forward_only else int(self.problem.stored_bytes[row, v])
        others = self.held_bytes[stage] - (0 if forward else stored)
        if forward or self.problem.peak_covers_backward:
            high = others + int(self.problem.peak_bytes[row, v])
            self.peak_bytes[stage] = max(self.peak_bytes[stage], high)
        self.held_bytes[stage] = others + (stored if forward or first else 0)
        (self.halved.add if first else self.halved.discard)((row, v))

    def _send(self, row: int, v: int, forward: bool, end: int) -> None:
        last = self.problem.virtual_stages - 1
        times = self.problem.forward_transfer_ns if forward else self.problem.backward_transfer_ns
        duration = int(times[row, v])
        self.arrival_ns[forward, row, v + 1 if forward else v - 1] = end + duration
        if forward and v == last:
            self.arrival_ns[False, row, v] = end
