"""Schedules: from a replica's costs to the order of passes on each of its stages.

A schedule is a pure function `ScheduleProblem → PassOrder`, under a name in `SCHEDULES`.
See `docs/adding-a-schedule.md`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dynapipe.errors import ConfigError, InfeasibleError
from megatron_dynapipe.plan.timeline import Timeline
from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem
from megatron_dynapipe.planning.schedules.list_scheduling import adaptive
from megatron_dynapipe.planning.schedules.one_f_one_b import gpipe, one_f_one_b_within_memory
from megatron_dynapipe.planning.simulate import simulate_all
from megatron_dynapipe.units import in_mb

SCHEDULES: Mapping[str, Callable[[ScheduleProblem], PassOrder]] = MappingProxyType(
    {"adaptive": adaptive, "1f1b": one_f_one_b_within_memory, "gpipe": gpipe}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """How passes are ordered."""

    method: str = "adaptive"
    """A name in `SCHEDULES`."""
    search_evaluations: int | None = None
    """Schedules that the adaptive method may try per iteration, besides those it begins with; None: as many as take
    about the same time whatever the batch, see `planning.search.default_evaluations`."""
    seed: int = 0
    """Of the search."""

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
    runs = simulate_all(problem, orders)
    fitting = [(run, order) for run, order in runs if max(run.peak_bytes) <= problem.memory_limit_bytes]
    run, order = min(fitting or runs, key=lambda candidate: candidate[0].makespan_ns)
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
