"""Schedules: from a replica's costs to the order of passes on each of its stages.

A schedule is a pure function `ScheduleProblem → PassOrder`, under a name in `SCHEDULES`.
See `docs/adding-a-schedule.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from megatron_dynapipe.core.errors import ConfigError, InfeasibleError
from megatron_dynapipe.core.instructions import Backward, Forward, Pass
from megatron_dynapipe.core.native import NEVER, PassOrder, agree, core
from megatron_dynapipe.core.network import GLOO_RULES
from megatron_dynapipe.core.plan import Timeline
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.simulate import Simulation, simulate, simulate_all
from megatron_dynapipe.core.units import in_mb


def gpipe(problem: ScheduleProblem) -> PassOrder:
    """All forwards chunk by chunk, then all backwards in the same order of micro-batches, last chunk first."""
    rows = range(problem.micro_batches)
    chunks = range(problem.chunks)
    forwards = tuple(Forward(row, chunk) for chunk in chunks for row in rows)
    backwards = tuple(Backward(row, chunk) for chunk in reversed(chunks) for row in rows)
    passes: tuple[Pass, ...] = forwards
    if not problem.forward_only:
        passes += backwards
    return (passes,) * problem.stages


def one_f_one_b(problem: ScheduleProblem, depths: Sequence[int] | None = None) -> PassOrder:
    """1F1B over the micro-batches in index order; interleaved where stages have several chunks.

    Args:
        problem: only its numbers of stages, chunks and micro-batches matter.
        depths: forwards per stage before its first backward, at least 1 and never rising from stage to stage; by
            default as many as fill the pipeline. A smaller depth holds fewer micro-batches in memory.
    """
    forwards, backwards = sequences(problem.micro_batches, problem.stages, problem.chunks)
    if problem.forward_only:
        return (forwards,) * problem.stages
    if depths is None:
        depths = default_depths(problem)
    assert len(depths) == problem.stages and min(depths) >= 1, depths
    assert all(ahead >= behind for ahead, behind in pairwise(depths)), depths
    return tuple(_alternate(forwards, backwards, depth) for depth in depths)


def one_f_one_b_within_memory(problem: ScheduleProblem) -> PassOrder:
    """1F1B with as many forwards ahead on each stage as its memory allows, at most the default number.

    Interleaved 1F1B has no smaller depths; it comes as it is.
    """
    problem = replace(problem, transfers=GLOO_RULES)  # the order alone says what is held
    depths = list(default_depths(problem))
    while True:
        order = one_f_one_b(problem, depths)
        if problem.chunks > 1 or problem.forward_only:
            return order
        peaks = simulate(problem, order).peak_bytes
        over = [stage for stage, peak in enumerate(peaks) if peak > problem.memory_limit_bytes and depths[stage] > 1]
        if not over:
            return order
        first = over[0]
        less = depths[first] - 1
        depths[first:] = [min(depth, less) for depth in depths[first:]]


def default_depths(problem: ScheduleProblem) -> tuple[int, ...]:
    """The depths that keep an even pipeline full: Megatron's, where it allows the number of micro-batches."""
    more = forwards_of_earlier_chunks(problem.micro_batches, problem.stages, problem.chunks)
    return tuple(depth + more for depth in filling_depths(problem.stages, problem.chunks))


def filling_depths(stages: int, chunks: int) -> tuple[int, ...]:
    """`default_depths` without `forwards_of_earlier_chunks`: they do not depend on the number of micro-batches."""
    per_stage = 2 if chunks > 1 else 1
    return tuple(per_stage * (stages - 1 - stage) + 1 for stage in range(stages))


def forwards_of_earlier_chunks(micro_batches: int, stages: int, chunks: int, *, full: bool = True) -> int:
    """Forwards that a stage runs of the largest group before the group reaches its last chunk."""
    return (chunks - 1) * max(_groups(micro_batches, stages, full), default=0)


def sequences(
    micro_batches: int, stages: int, chunks: int, *, full: bool = True
) -> tuple[tuple[Forward, ...], tuple[Backward, ...]]:
    """The order of forwards and of backwards that all stages share: group by group, and in a group chunk by chunk."""
    forwards: list[Forward] = []
    backwards: list[Backward] = []
    first = 0
    for size in _groups(micro_batches, stages, full):
        rows = range(first, first + size)
        forwards += [Forward(row, chunk) for chunk in range(chunks) for row in rows]
        backwards += [Backward(row, chunk) for chunk in reversed(range(chunks)) for row in rows]
        first += size
    return tuple(forwards), tuple(backwards)


def _groups(micro_batches: int, stages: int, full: bool) -> list[int]:
    """Micro-batches that pass a chunk together: even groups of at least as many as there are stages, or at most.

    With full groups of g ≥ stages (or a single one), and depths by the largest, a stage's forward never waits for a
    backward that stands after it, whatever the number of micro-batches; Megatron's rule, groups of exactly `stages`, is
    the case in which the number divides.
    """
    if full:
        count = max(micro_batches // stages, 1)
    else:
        count = max(-(-micro_batches // stages), 1)
    small, larger = divmod(micro_batches, count)
    return [small + (group < larger) for group in range(count)]


def _alternate(forwards: Sequence[Pass], backwards: Sequence[Pass], depth: int) -> tuple[Pass, ...]:
    """`depth` forwards, then backward and forward in turn until both run out."""
    depth = min(depth, len(forwards))
    passes = list(forwards[:depth])
    for index, backward in enumerate(backwards):
        passes.append(backward)
        if depth + index < len(forwards):
            passes.append(forwards[depth + index])
    return tuple(passes)


DEEPENINGS = (0, 1, 3, 8)
"""Micro-batches in flight beyond those that fill the pipeline, as tried by `adaptive`."""


class Rule(IntEnum):
    """Which pass a stage takes where its next forward and its next backward could both start."""

    BACKWARD_FIRST = 0
    FORWARD_FIRST = 1
    STRICT = 2
    """1F1B: wait for the forward until `depth` are in flight, and for the backward then."""


agree("Rule", {rule.name: rule.value for rule in Rule})


@dataclass(frozen=True, slots=True)
class Policy:
    """How list scheduling chooses."""

    depths: tuple[int, ...]
    """Per stage, most forwards ahead of its backwards; with several chunks, beyond `forwards_of_earlier_chunks`."""
    rule: Rule


def list_schedule(problem: ScheduleProblem, policy: Policy) -> PassOrder | None:
    """The order in which stages take passes under a policy, in the problem's own predicted times.

    None where a micro-batch does not fit a stage's memory even alone, and where stages wait for each other for ever.
    """
    makespan, forwards = core.list_schedule(
        problem.cost_arrays,
        problem.chunks,
        problem.model_state_bytes,
        problem.memory_limit_bytes,
        problem.forward_only,
        np.array(policy.depths, np.int64),
        int(policy.rule),
        problem.peak_covers_backward,
    )
    if makespan >= NEVER:
        return None
    return order_of(np.array(forwards).reshape(problem.stages, -1).tolist(), problem, policy.rule)


def order_of(forwards: Sequence[Sequence[int]], problem: ScheduleProblem, rule: Rule) -> PassOrder:
    """The passes of every stage from 1 per forward and 0 per backward, as the native core returns them."""
    in_order = sequences(problem.micro_batches, problem.stages, problem.chunks, full=rule is not Rule.BACKWARD_FIRST)
    return tuple(_passes(stage, *in_order) for stage in forwards)


def _passes(taken: Sequence[int], forwards: Sequence[Forward], backwards: Sequence[Backward]) -> tuple[Pass, ...]:
    forward = iter(forwards)
    backward = iter(backwards)
    return tuple(next(forward) if is_forward else next(backward) for is_forward in taken)


def adaptive(problem: ScheduleProblem) -> PassOrder:
    """The best of (interleaved) 1F1B and the list schedules of a few policies, for the micro-batches in index order."""
    plain = one_f_one_b_within_memory(problem)
    scheduled = [order for policy in policies(problem) if (order := list_schedule(problem, policy)) is not None]
    _, order = _fastest(problem, (plain, *scheduled))
    return order


def _fastest(problem: ScheduleProblem, orders: Sequence[PassOrder]) -> tuple[Simulation, PassOrder]:
    """The fastest order, of those that fit the memory if any does."""
    runs = simulate_all(problem, orders)
    fitting = [(run, order) for run, order in runs if max(run.peak_bytes) <= problem.memory_limit_bytes]
    return min(fitting or runs, key=lambda candidate: candidate[0].makespan_ns)


def policies(problem: ScheduleProblem) -> list[Policy]:
    """Policies to try: every rule, at 1F1B's depths and deeper; the last stage turns each micro-batch round at once."""
    base = filling_depths(problem.stages, problem.chunks)
    tried = []
    for extra in DEEPENINGS:
        deeper = [depth + extra for depth in base[:-1]]
        tried += [Policy((*deeper, 1), rule) for rule in Rule]
    return tried


SCHEDULES: Mapping[str, Callable[[ScheduleProblem], PassOrder]] = MappingProxyType(
    {"adaptive": adaptive, "1f1b": one_f_one_b_within_memory, "gpipe": gpipe}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """How passes are ordered."""

    method: str = "adaptive"
    """A name in `SCHEDULES`."""
    search_evaluations: int | None = None
    """Schedules that the adaptive method may try per iteration, after the ones it begins with; None: as many as take
    about the same time whatever the batch."""
    seed: int = 0
    """Draws the search's mutations."""

    def __post_init__(self) -> None:
        if self.method not in SCHEDULES:
            raise ConfigError(f"expected a schedule among {', '.join(sorted(SCHEDULES))}, got {self.method!r}")
        if self.search_evaluations is not None and self.search_evaluations < 0:
            raise ConfigError(f"expected at least 0 search evaluations, got {self.search_evaluations}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"expected a seed from 0 to 2^64 - 1, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pass order and what is predicted of it."""

    order: PassOrder
    timeline: Timeline
    makespan_ns: int
    peak_bytes: tuple[int, ...]
    """Per stage, model state included."""


def schedule(problem: ScheduleProblem, settings: ScheduleSettings) -> Schedule:
    """Order the passes of one replica.

    Raises:
        InfeasibleError: the order holds more than a stage's memory.
    """
    return predict(problem, SCHEDULES[settings.method](problem))


def predict(problem: ScheduleProblem, *orders: PassOrder) -> Schedule:
    """The fastest of some pass orders, of those that fit the memory, with its predictions.

    Raises:
        InfeasibleError: every order holds more than a stage's memory.
    """
    run, order = _fastest(problem, orders)
    check_memory(problem, run.peak_bytes)
    return Schedule(order=order, timeline=run.timeline, makespan_ns=run.makespan_ns, peak_bytes=run.peak_bytes)


def check_memory(problem: ScheduleProblem, peak_bytes: tuple[int, ...]) -> None:
    """Raise an InfeasibleError naming the first stage whose peak is over the limit."""
    for stage, used in enumerate(peak_bytes):
        if used > problem.memory_limit_bytes:
            needed, available = in_mb(used, problem.memory_limit_bytes)
            raise InfeasibleError(
                f"stage {stage} needs {needed} with this schedule, of {available}",
                hint="use smaller micro-batches, more recomputation, or a schedule that holds fewer of them",
            )
