"""Timelines as a Chrome trace: open it in Perfetto or chrome://tracing.

One process per timeline (planned, measured), one thread per stage, one slice per instruction.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.plan.instructions import Backward, Forward, Instruction, RecvStart, RecvWait, SendStart, SendWait
from megatron_dynapipe.plan.text import format_instruction
from megatron_dynapipe.report.panel import Panel

_NS_PER_US = 1_000


def write_trace(panels: Sequence[Panel], path: Path) -> Path:
    """Write timelines as Chrome trace events (times in microseconds)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = [event for process, panel in enumerate(panels) for event in _panel_events(process, panel)]
    path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _panel_events(process: int, panel: Panel) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": panel.title}}
    for stage, events in enumerate(panel.timeline):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": stage, "args": {"name": f"stage {stage}"}}
        for event in events:
            yield {
                "ph": "X",
                "name": format_instruction(event.instruction).partition("[")[0],
                "cat": _category(event.instruction),
                "pid": process,
                "tid": stage,
                "ts": event.start_ns / _NS_PER_US,
                "dur": (event.end_ns - event.start_ns) / _NS_PER_US,
                "args": {"micro_batch": event.instruction.micro_batch},
            }


def _category(instruction: Instruction) -> str:
    match instruction:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case RecvWait() | SendWait():
            return "wait"
        case RecvStart() | SendStart():
            return "transfer"
        case _:
            return "buffer"
