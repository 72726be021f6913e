"""Timelines as a Chrome trace: open it in Perfetto or chrome://tracing.

One process per timeline (planned, measured), one thread per stage, one slice per instruction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.core.instructions import EFFECTS, format_instruction
from megatron_dynapipe.core.plan import Timeline, idle_share
from megatron_dynapipe.outputs import GENERATOR, marked, write_file

_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a picture or trace, with its title, and the micro-batches of each sample that is cut."""

    title: str
    timeline: Timeline
    chains: Sequence[Sequence[int]] = ()

    @property
    def span_ns(self) -> int:
        """The time from the start of the iteration to its last event's end."""
        return max((event.end_ns for events in self.timeline for event in events), default=0)

    @property
    def idle_share(self) -> float:
        """The share of all stages' time until the last event that no pass took."""
        return idle_share(self.timeline, self.span_ns)


def write_trace(panels: Sequence[Panel], path: Path) -> Path:
    """Write timelines as Chrome trace events (times in microseconds); raises ConfigError as `write_file`."""
    events = [event for process, panel in enumerate(panels) for event in _panel_events(process, panel)]
    trace = {"otherData": {"generator": GENERATOR}, "traceEvents": events, "displayTimeUnit": "ms"}
    write_file(path, msgspec.json.encode(trace), is_ours=marked(GENERATOR))
    return path


def _panel_events(process: int, panel: Panel) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": panel.title}}
    for stage, events in enumerate(panel.timeline):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": stage, "args": {"name": f"stage {stage}"}}
        for event in events:
            yield {
                "ph": "X",
                "name": format_instruction(event.instruction).partition("[")[0],
                "cat": EFFECTS[type(event.instruction)].work.value,
                "pid": process,
                "tid": stage,
                "ts": event.start_ns / _NS_PER_US,
                "dur": (event.end_ns - event.start_ns) / _NS_PER_US,
                "args": {"micro_batch": event.instruction.micro_batch},
            }
