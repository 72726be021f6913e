"""Pictures of timelines: stages as rows, forward and backward passes as numbered boxes, waits in between.

stage 0  ▐0▐1▐2▐3▐░░░░▐0 ▐4▐1 ▐…      blue: forward, orange: backward (lighter on later chunks)
stage 1  ░░▐0▐1▐2▐░░▐0 ▐3▐1 ▐…        grey: nothing runs; hatched: a measured wait for a transfer
            ━━━━━                     a stripe of one colour: pieces of one sample
"""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_dynapipe.core.instructions import EFFECTS, Pass, Work
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import NS_PER_MS
from megatron_dynapipe.outputs import GENERATOR, marked, write_file
from megatron_dynapipe.report.trace import Panel

FORWARD = "#4878a8"
BACKWARD = "#e08a3c"
WEIGHT = "#8a9a4b"
IDLE = "#e9e9e9"
WAIT = "#c9c9c9"
CHAINS = ("#1b7f3b", "#a3206b", "#5b3fb0", "#7a5c00", "#00727a", "#b3261e")
"""Colours of samples that are cut, in turn."""

_ROW = 0.42  # height of a stage's row, in inches
_BOX = 0.8  # height of a box, as a fraction of its row
_STRIPE = 0.13  # of a sample in pieces, likewise
_WIDTH = 16.0  # of the picture, in inches
_POINTS_PER_CHARACTER = 5.0


def draw(panels: Sequence[Panel], path: Path) -> Path:
    """Draw timelines above one another, on one time scale, as PNG or SVG by the path's suffix.

    Raises:
        ConfigError: as `outputs.write_file`.
    """
    rows = [max(len(panel.timeline), 1) for panel in panels]
    height = sum(rows) * _ROW + 0.85 * len(panels) + 0.3
    figure = Figure(figsize=(_WIDTH, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
    scale = max((panel.span_ns for panel in panels), default=0)
    for panel, axis in zip(panels, axes, strict=True):
        _draw_panel(axis, panel, max(scale, 1) / NS_PER_MS)
    _add_legend(figure, panels)
    return save(figure, path)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG or SVG by the path's suffix, marked as this program's; raises as `outputs.write_file`."""
    data = io.BytesIO()
    kind = path.suffix.lstrip(".")
    figure.savefig(data, format=kind, metadata={"Software" if kind == "png" else "Creator": GENERATOR})
    write_file(path, data.getvalue(), is_ours=marked(GENERATOR))
    return path


def _draw_panel(axis: Axes, panel: Panel, scale: float) -> None:
    span = max(panel.span_ns, 1) / NS_PER_MS
    stages = len(panel.timeline)
    axis.set_xlim(0, scale)
    axis.set_ylim(stages - 0.5, -0.5)
    axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axis.set_xlabel("ms")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    axis.set_title(
        f"{panel.title} – {_duration(span)}, stages idle {panel.idle_share:.0%} of the time", loc="left", fontsize=10
    )
    axis.barh(range(stages), [span] * stages, height=_BOX, color=IDLE, zorder=0)
    for stage, events in enumerate(panel.timeline):
        _draw_stage(axis, stage, events, scale)
        _draw_chains(axis, stage, events, panel.chains)


def _draw_stage(axis: Axes, stage: int, events: Sequence[Event], scale: float) -> None:
    inches_per_ms = (_WIDTH - 1.2) / scale
    waits = [e for e in events if EFFECTS[type(e.instruction)].work is Work.WAIT]
    passes = [e for e in events if isinstance(e.instruction, Pass)]
    axis.add_collection(
        PolyCollection([_box(e, stage) for e in waits], facecolors=WAIT, edgecolors="white", hatch="////", zorder=1)
    )
    axis.add_collection(
        PolyCollection(
            [_box(e, stage) for e in passes],
            facecolors=[_colour(e) for e in passes],
            edgecolors="white",
            linewidths=1.0,
            zorder=2,
        )
    )
    for event in passes:
        label = str(event.instruction.micro_batch)
        width = (event.end_ns - event.start_ns) / NS_PER_MS
        if width * inches_per_ms * 72 >= _POINTS_PER_CHARACTER * len(label) + 1:
            middle = event.start_ns / NS_PER_MS + width / 2
            axis.text(middle, stage, label, ha="center", va="center", fontsize=7, color="white", zorder=3, clip_on=True)


def _draw_chains(axis: Axes, stage: int, events: Sequence[Event], chains: Sequence[Sequence[int]]) -> None:
    """A stripe at the bottom of every pass of a sample that is cut; several samples' stripes above one another."""
    corners = []
    colours = []
    for event in events:
        if not isinstance(event.instruction, Pass):
            continue
        samples = [number for number, chain in enumerate(chains) if event.instruction.micro_batch in chain]
        for place, number in enumerate(samples):
            bottom = stage + _BOX / 2 - place * _STRIPE
            corners.append(_corners(event, bottom - _STRIPE, bottom))
            colours.append(CHAINS[number % len(CHAINS)])
    axis.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.5, zorder=3))


def _box(event: Event, stage: int) -> list[tuple[float, float]]:
    return _corners(event, stage - _BOX / 2, stage + _BOX / 2)


def _corners(event: Event, top: float, bottom: float) -> list[tuple[float, float]]:
    left = event.start_ns / NS_PER_MS
    right = event.end_ns / NS_PER_MS
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _colour(event: Event) -> tuple[float, float, float]:
    step = event.instruction
    assert isinstance(step, Pass)
    colours = {Work.FORWARD: FORWARD, Work.WEIGHTS: WEIGHT}
    return _paler(colours.get(EFFECTS[type(step)].work, BACKWARD), step.chunk)


def _paler(colour: str, chunk: int) -> tuple[float, float, float]:
    """A pass's colour: the first chunk has the full one, later ones are paler."""
    red, green, blue = to_rgb(colour)
    paler = 1 - 0.7**chunk
    return red + (1 - red) * paler, green + (1 - green) * paler, blue + (1 - blue) * paler


def _passes(events: Sequence[Event]) -> list[Pass]:
    return [event.instruction for event in events if isinstance(event.instruction, Pass)]


def _duration(span_ms: float) -> str:
    return f"{span_ms:,.0f} ms" if span_ms >= 100 else f"{span_ms:.3g} ms"


def _add_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    handles = [
        Patch(color=FORWARD, label="forward"),
        Patch(color=BACKWARD, label="backward"),
        Patch(color=IDLE, label="idle"),
    ]
    works = {EFFECTS[type(event.instruction)].work for panel in panels for stage in panel.timeline for event in stage}
    if Work.WEIGHTS in works:
        handles.insert(2, Patch(color=WEIGHT, label="weight gradients"))
    if Work.WAIT in works:
        handles.append(Patch(facecolor=WAIT, hatch="////", edgecolor="white", label="waiting for a transfer"))
    if any(panel.chains for panel in panels):
        handles.append(Patch(color=CHAINS[0], label="pieces of one sample (a colour each)"))
    chunks = {step.chunk for panel in panels for stage in panel.timeline for step in _passes(stage)}
    if len(chunks) > 1:
        paler = Patch(color=_paler(FORWARD, 1), label=f"paler: later virtual stages of a stage ({len(chunks)})")
        handles.append(paler)
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
