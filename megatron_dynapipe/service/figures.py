"""What a planner reports of itself: figures in the store, lines in its log, OpenMetrics text on request."""

import time
from collections.abc import Iterable

import msgspec

from megatron_dynapipe.units import NS_PER_MS

REPORT_S = 2.0
"""Between two reports to the store."""
LOG_S = 60.0


class PlannerFigures(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Counts since the planner started, and its window as it is.

    Attributes:
        planner: its number.
        planned: iterations that it has planned and published.
        planning_ns: time it took to plan and publish them.
        published_bytes: of their plans.
        window_iterations, window_bytes: of the training split, planned beyond the iteration in training.
        taken_over: iterations that another planner had claimed and did not publish within its lease.
        leases_lost: iterations that it published after its own lease.
        store_full: times at which the store had no memory left.
        interruptions: times at which the store was out of reach.
        waits_ns: time in which it had nothing to plan.
    """

    planner: int
    planned: int = 0
    planning_ns: int = 0
    published_bytes: int = 0
    window_iterations: int = 0
    window_bytes: int = 0
    taken_over: int = 0
    leases_lost: int = 0
    store_full: int = 0
    interruptions: int = 0
    waits_ns: int = 0

    def as_line(self) -> str:
        """For the log."""
        each_ms = self.planning_ns / max(self.planned, 1) / NS_PER_MS
        return (
            f"{self.planned} iterations planned, {each_ms:.1f} ms each, {self.published_bytes:,} bytes; "
            f"{self.window_iterations} iterations ahead ({self.window_bytes:,} bytes); {self.taken_over} taken over, "
            f"{self.leases_lost} leases lost, store full {self.store_full} times, out of reach {self.interruptions} "
            f"times, {self.waits_ns / 1e9:.1f} s without work"
        )


class Clock:
    """Says when a report and when a line are due."""

    def __init__(self) -> None:
        self._report = self._line = -float("inf")
        self._line = time.monotonic()

    def report_due(self) -> bool:
        """Whether the last report is old; the next one is then counted from now."""
        if time.monotonic() - self._report < REPORT_S:
            return False
        self._report = time.monotonic()
        return True

    def line_due(self) -> bool:
        """Whether the last line is old."""
        if time.monotonic() - self._line < LOG_S:
            return False
        self._line = time.monotonic()
        return True


def decode_figures(data: bytes) -> PlannerFigures | None:
    """What a planner reported; None of anything else, as another version's."""
    try:
        return msgspec.json.decode(data, type=PlannerFigures)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_METRICS = (
    ("planned", "iterations", "counter", "Iterations planned and published.", 1),
    ("planning_ns", "planning_seconds", "counter", "Time spent on planning and publishing.", 1e9),
    ("published_bytes", "published_bytes", "counter", "Bytes of published plans.", 1),
    ("taken_over", "taken_over", "counter", "Iterations whose planner did not publish within its lease.", 1),
    ("leases_lost", "leases_lost", "counter", "Iterations published after the lease.", 1),
    ("store_full", "store_full", "counter", "Times the store had no memory left.", 1),
    ("interruptions", "interruptions", "counter", "Times the store was out of reach.", 1),
    ("waits_ns", "idle_seconds", "counter", "Time without anything to plan.", 1e9),
    ("window_iterations", "window_iterations", "gauge", "Iterations planned beyond the one in training.", 1),
    ("window_bytes", "window_bytes", "gauge", "Bytes of plans from the iteration in training on.", 1),
)


def open_metrics(jobs: Iterable[tuple[str, PlannerFigures]]) -> str:
    """OpenMetrics text of (job, planner's figures), as Prometheus reads it."""
    found, lines = list(jobs), []
    for field, name, kind, text, unit in _METRICS:
        full = f"dynapipe_planner_{name}"
        lines += [f"# TYPE {full} {kind}", f"# HELP {full} {text}"]
        if name.endswith(("_seconds", "_bytes")):
            lines.insert(-1, f"# UNIT {full} {name.rpartition('_')[2]}")
        suffix = "_total" if kind == "counter" else ""
        for job, figures in found:
            value = getattr(figures, field) / unit if unit != 1 else getattr(figures, field)
            lines.append(f'{full}{suffix}{{job="{job}",planner="{figures.planner}"}} {value}')
    return "\n".join([*lines, "# EOF", ""])
