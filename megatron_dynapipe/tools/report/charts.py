"""The charts of a run's page as Plotly's own descriptions, without the colours of the page's theme.

Lines of many iterations are thinned out to means over neighbours. Timelines are drawn one iteration at a time:

planned   stage 0  ▐F0▐F1▐░░▐B0▐B1▐
          stage 1  ░░▐F0▐B0▐F1▐B1▐░░        a box has its instruction, its start and its duration
measured  stage 0  ▐F0▐F1▐▒▒▒▒▐B0▐B1▐
          stage 1  ▒▒▐F0▐B0▐▒▐F1▐B1▐        ▒ a transfer's instruction, mostly waiting
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dynapipe.core.instructions import EFFECTS, Work, format_instruction
from megatron_dynapipe.core.plan import Timeline, kind_of
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS
from megatron_dynapipe.tools.report.run import PASSES, RecordedTimeline, Run, stage_medians

ITERATION = "iteration"
"""Title of the axes of iterations."""
MOST_LINES = 8
"""Tasks in one chart."""
MOST_POINTS = 1_000
"""Points of a line."""
MOST_BOXES = 120_000
"""Boxes of the page, which shows as many iterations as this allows, at least one."""
MOST_DRAWN = 12_000
"""Boxes of one panel; beyond, the shortest are left out."""
LEAST_SHARE = 1 / 5_000
"""A share of the iteration: shorter waits would be thinner than a pixel until zoomed far in."""

FAR_ABOVE = 4
"""Times the fullest stage's memory: a limit's line there would flatten the bars."""

FORWARD = "#4f8fd0"
BACKWARD = "#e08a3c"
BUBBLE = "#a3abb5"
TRANSFER = "#8c6bb1"
PLAN_WAIT = "#d9534f"
OTHER = "#c2a878"
REDUCTION = "#3c7d7a"
OPTIMIZER = "#b5c94c"
BETWEEN = "#6aa57a"
LIMIT = "#d9534f"

PARTS = (
    ("forward", FORWARD),
    ("backward", BACKWARD),
    ("bubble", BUBBLE),
    ("transfer", TRANSFER),
    ("other", OTHER),
    ("plan_wait", PLAN_WAIT),
    ("reduction", REDUCTION),
    ("optimizer", OPTIMIZER),
    ("between", BETWEEN),
)
"""What the bars of an iteration show, from below, with their colours."""
LABELS = {
    "bubble": "bubble: peer not ready",
    "transfer": "transfer wait",
    "other": "loads and frees",
    "plan_wait": "plan wait",
    "reduction": "gradient reduction",
    "between": "host: log, evaluation, checkpoint",
}
"""Names of parts that say more than their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page, or a table: `traces` and `layout` are Plotly's, `note` says what is to be seen."""

    name: str
    title: str
    note: str = ""
    traces: list[dict[str, Any]]
    table: list[list[str]] = field(default_factory=list)
    """Rows of cells, the first with the columns' names; below the chart."""
    layout: dict[str, Any] = field(default_factory=dict)


def run_charts(run: Run) -> list[Chart]:
    """The charts that the run's records have something for."""
    evaluations = [_evaluation(run, split, losses) for split, losses in run.evaluations.items() if any(losses.values())]
    drawn = [_loss(run), *evaluations, _efficiency(run), _prediction(run), _stages(run), _memory(run)]
    charts = [chart for chart in drawn if chart.traces or chart.table]
    for chart in charts:
        if chart.layout.get("xaxis", {}).get("title") != ITERATION:
            continue
        chart.layout["xaxis"] |= _whole(run.iterations[-1].iteration - run.iterations[0].iteration)
    return charts


def thinned(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `MOST_POINTS` points: means over equally many neighbours, at the first one's place."""
    stride = -(-len(xs) // MOST_POINTS) or 1
    means = []
    for first in range(0, len(xs), stride):
        neighbours = ys[first : first + stride]
        mean = sum(neighbours) / len(neighbours)
        means.append(float(f"{mean:.6g}"))
    return list(xs[::stride]), means


def _line(name: str, xs: Sequence[int], ys: Sequence[float], **more: object) -> dict[str, Any]:
    x, y = thinned(xs, ys)
    mode = "lines+markers" if len(x) <= 60 else "lines"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def _numbers(run: Run) -> list[int]:
    """Iterations as Megatron counts them, from 1."""
    return [record.iteration + 1 for record in run.iterations]


def _by_iteration(y: str) -> dict[str, Any]:
    return {"xaxis": {"title": ITERATION}, "yaxis": {"title": y}}


def _loss(run: Run) -> Chart:
    traces = [
        _line(name, [iteration + 1 for iteration in values], list(values.values()))
        for name, values in run.losses.items()
    ]
    return Chart(name="loss", title="Loss", note="Mean over tokens.", traces=traces, layout=_by_iteration("loss"))


def _evaluation(run: Run, split: str, losses: Mapping[str, Mapping[int, float]]) -> Chart:
    """The losses of a split by task: few tasks as lines, all tasks as a table."""
    whole = next(iter(losses))
    times = sorted({iteration for values in losses.values() for iteration in values})
    tasks = {name.removeprefix(f"{whole} "): line for name, line in losses.items() if name != whole and line}
    shown = {"all tasks": losses[whole]}
    if len(tasks) <= MOST_LINES:
        shown |= tasks
    lines = []
    if len(times) > 1:
        lines = [_line(name, list(values), list(values.values())) for name, values in shown.items()]
    ranked = sorted(tasks.items(), key=lambda task: -task[1][max(task[1])])
    note = "Mean over tokens. Samples are the split's, tokens those that count; a click on a column's head sorts by it."
    if run.run is not None and (ran := run.run.evaluated.get(split)):
        there = sum(run.run.samples.get(split, {}).values())
        note = f"An evaluation runs {ran:,} samples of the split's {there:,}, whose tokens count. {note}"
    columns = sorted({times[0], times[-1]})
    samples: dict[str, int] = {}
    if run.run is not None:
        samples |= run.run.samples.get(split, {})
        samples["all tasks"] = sum(samples.values())
    counted = {name.removeprefix(f"{whole} "): count for name, count in run.tokens.get(split, {}).items()}
    counted["all tasks"] = counted.pop(whole, 0)
    table = [["task", "samples", "tokens", *(f"after iteration {at}" for at in columns)]]
    for name, values in [("all tasks", losses[whole]), *ranked]:
        sizes = [f"{of[name]:,}" if of.get(name) else "" for of in (samples, counted)]
        cells = [f"{values[at]:.4f}" if at in values else "" for at in columns]
        table.append([name, *sizes, *cells])
    title = "Training by task" if split == "train" else f"Evaluation: {split}"
    layout = _by_iteration("loss")
    return Chart(name=f"loss-{split}", title=title, note=note, traces=lines, table=table, layout=layout)


def _efficiency(run: Run) -> Chart:
    shares = [100 * record.totals.padding_efficiency for record in run.iterations]
    layout = _by_iteration("%")
    layout["yaxis"]["range"] = [0, 102]
    note = "Real tokens among all positions: 100% is no padding."
    traces = [_line("padding efficiency", _numbers(run), shares, line={"color": FORWARD})]
    return Chart(name="padding", title="Padding efficiency", note=note, traces=traces, layout=layout)


def _prediction(run: Run) -> Chart:
    measured = [record.measured_ns / NS_PER_MS for record in run.iterations]
    predicted = [record.predicted_ns / NS_PER_MS for record in run.iterations]
    layout = _by_iteration("ms")
    note = "Of an iteration's list, on the slowest replica."
    first = {start.first_iteration for start in run.starts} or {run.iterations[0].iteration}
    others = [
        max(record.measured_ns, record.predicted_ns) / NS_PER_MS
        for record in run.iterations
        if record.iteration not in first
    ]
    top = 1.08 * max(others, default=math.inf)
    if max(measured) > top:
        layout["yaxis"]["range"] = [0, round(top, 3)]
        note += f" A start's first iteration, here up to {max(measured):,.0f} ms, pays for starting up, and is cut off."
    return Chart(
        name="prediction",
        title="Predicted and measured time",
        note=note,
        traces=[
            _line("measured", _numbers(run), measured, line={"color": BACKWARD}),
            _line("predicted", _numbers(run), predicted, line={"color": FORWARD, "dash": "dot"}),
        ],
        layout=layout,
    )


def _stages(run: Run) -> Chart:
    medians = stage_medians(run)
    traces = []
    for part, colour in PARTS if medians else ():
        traces.append(
            {
                "type": "bar",
                "name": LABELS.get(part, part),
                "x": [*medians],
                "y": [round(row[part] / NS_PER_MS, 4) for row in medians.values()],
                "marker": {"color": colour},
                "hovertemplate": "stage %{x}: %{y:.3g} ms",
            }
        )
    layout = {"barmode": "stack", "xaxis": {"title": "stage", **_whole(len(medians))}, "yaxis": {"title": "ms"}}
    note = "Medians per iteration. Bubble and transfer come from the recorded timelines."
    return Chart(name="stages", title="Where time went", note=note, traces=traces, layout=layout)


def _memory(run: Run) -> Chart:
    if not run.stages:
        return Chart(name="memory", title="", traces=[])
    at = list(run.stages)
    records = list(run.stages.values())
    state = list(run.run.model_state_bytes) if run.run else []
    counted = len(state) == len(at)
    planned = [max(record.planned_activation_bytes for record in stage) for stage in records]
    bars = [("planned activations", planned, FORWARD)]
    if counted:
        bars.insert(0, ("model state", state, BETWEEN))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": at,
            "y": _mb(values),
            "marker": {"color": colour},
            "hovertemplate": "stage %{x}: %{y:,.0f} MB",
        }
        for name, values, colour in bars
    ]
    for name, field_name, symbol in (
        ("held by the allocator", "reserved_bytes", "diamond"),
        ("tensors at their peak", "allocated_bytes", "circle"),
    ):
        most = [max(getattr(record, field_name) for record in stage) for stage in records]
        if any(most):
            marker = {"symbol": symbol, "size": 9, "color": BACKWARD}
            traces.append(
                {"type": "scatter", "mode": "markers", "name": name, "x": at, "y": _mb(most), "marker": marker}
            )
    note = "The most of any iteration." + ("" if counted else " Model state is not counted here.")
    limit = run.run.memory_limit_bytes if run.run else 0
    stacked = [sum(values) for values in zip(*(values for _, values, _ in bars), strict=True)]
    if limit > FAR_ABOVE * max(stacked):
        note += f" The limit, {limit / BYTES_PER_MB:,.0f} MB, is far above."
    elif limit:
        ends = [min(at) - 0.5, max(at) + 0.5]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"limit: {limit / BYTES_PER_MB:,.0f} MB",
                "x": ends,
                "y": _mb([limit, limit]),
                "line": {"color": LIMIT, "dash": "dash"},
                "hoverinfo": "name",
            }
        )
    layout = {"barmode": "stack", "xaxis": {"title": "stage", **_whole(len(at))}, "yaxis": {"title": "MB"}}
    return Chart(name="memory", title="Memory by stage", note=note, traces=traces, layout=layout)


def _whole(count: int) -> dict[str, Any]:
    """Ticks at whole numbers."""
    return {"dtick": 1} if count <= 16 else {}


def _mb(values: Sequence[int]) -> list[float]:
    return [round(value / BYTES_PER_MB, 2) for value in values]


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
        if kind_of(event.instruction) in PASSES or event.end_ns - event.start_ns >= span * LEAST_SHARE
    ]
    if len(shown) > MOST_DRAWN:
        shown = sorted(shown, key=lambda box: box[0].start_ns - box[0].end_ns)[:MOST_DRAWN]
    kinds: dict[str, dict[str, list[Any]]] = {}
    for event, stage in shown:
        is_weights = EFFECTS[type(event.instruction)].work is Work.WEIGHTS
        name = "weights" if is_weights else kind_of(event.instruction)
        kind = kinds.setdefault(name, {"stage": [], "start": [], "length": [], "text": []})
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
