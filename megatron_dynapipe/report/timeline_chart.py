"""Recorded timelines as boxes for the page: planned above measured, one iteration drawn at a time.

planned   stage 0  ▐F0▐F1▐░░▐B0▐B1▐
          stage 1  ░░▐F0▐B0▐F1▐B1▐░░        a box says its instruction, when it begins and how long it takes
measured  stage 0  ▐F0▐F1▐▒▒▒▒▐B0▐B1▐
          stage 1  ▒▒▐F0▐B0▐▒▐F1▐B1▐        ▒ inside a transfer's instruction, mostly waiting
"""

from collections.abc import Sequence
from typing import Any

from megatron_dynapipe.plan.text import format_instruction
from megatron_dynapipe.plan.timeline import Timeline
from megatron_dynapipe.report.run import RecordedTimeline
from megatron_dynapipe.report.stage_times import BACKWARD, FORWARD, kind_of
from megatron_dynapipe.units import NS_PER_MS

MOST_BOXES = 120_000
"""Of the page: as many iterations as this allows, at least one."""
MOST_DRAWN = 12_000
"""Of one panel; the shortest are left out beyond."""
LEAST_SHARE = 1 / 5_000
"""Of the iteration: waits that are shorter would be thinner than a pixel until zoomed far in."""


def timeline_panels(timelines: Sequence[RecordedTimeline]) -> list[dict[str, Any]]:
    """The timelines of a page, in order: the last one, and others spread over the run as far as there is room."""
    chosen: dict[int, dict[str, Any]] = {}
    boxes = 0
    for at in _spread(len(timelines)):
        panel = _panel(timelines[at])
        boxes += sum(panel[side]["boxes"] for side in ("planned", "measured"))
        if chosen and boxes > MOST_BOXES:
            break
        chosen[at] = panel
    return [panel for _, panel in sorted(chosen.items())]


def _spread(count: int) -> list[int]:
    """All indices, the last first, then halves, quarters, … of what is left."""
    order = dict.fromkeys([count - 1, 0] if count else [])
    stride = count
    while stride > 1:
        stride = -(-stride // 2)
        order |= dict.fromkeys(range(0, count, stride))
    return list(order)


def _panel(timeline: RecordedTimeline) -> dict[str, Any]:
    replica = f", replica {timeline.replica}" if timeline.replica else ""
    return {
        "name": f"iteration {timeline.iteration + 1}{replica}",
        "planned": _boxes(timeline.planned),
        "measured": _boxes(timeline.measured),
    }


def _boxes(timeline: Timeline) -> dict[str, Any]:
    """Boxes by kind, in milliseconds, with how many were too small to show."""
    span = max((event.end_ns for events in timeline for event in events), default=0)
    events = [(event, stage) for stage, events in enumerate(timeline) for event in events]
    shown = [
        (event, stage)
        for event, stage in events
        if kind_of(event.instruction) in (FORWARD, BACKWARD) or event.end_ns - event.start_ns >= span * LEAST_SHARE
    ]
    if len(shown) > MOST_DRAWN:
        shown = sorted(shown, key=lambda each: each[0].start_ns - each[0].end_ns)[:MOST_DRAWN]
    kinds: dict[str, dict[str, list[Any]]] = {}
    for event, stage in shown:
        kind = kinds.setdefault(kind_of(event.instruction), {"stage": [], "start": [], "length": [], "text": []})
        kind["stage"].append(stage)
        kind["start"].append(round(event.start_ns / NS_PER_MS, 4))
        kind["length"].append(round((event.end_ns - event.start_ns) / NS_PER_MS, 4))
        kind["text"].append(format_instruction(event.instruction))
    return {
        "stages": len(timeline),
        "span": round(span / NS_PER_MS, 4),
        "boxes": len(shown),
        "left_out": len(events) - len(shown),
        "kinds": kinds,
    }
