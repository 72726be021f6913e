"""The charts of a run's page as Plotly's own descriptions: traces and a layout without colours of the theme.

Lines of many iterations are thinned out to means over neighbours; shapes to the most frequent ones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dynapipe.report.run import Run, stage_medians
from megatron_dynapipe.report.summary import whole_ns
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS, Shape

MOST_POINTS = 1_000
"""Of a line."""
MOST_SHAPES = 1_500

FORWARD, BACKWARD, BUBBLE, TRANSFER = "#4f8fd0", "#e08a3c", "#a3abb5", "#8c6bb1"
PLAN_WAIT, OTHER, BETWEEN, LIMIT = "#d9534f", "#c2a878", "#6aa57a", "#d9534f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page: `traces` and `layout` are Plotly's, `note` says what is to be seen."""

    name: str
    title: str
    note: str = ""
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)


def run_charts(run: Run) -> list[Chart]:
    """The charts that the run's records have something for."""
    made = [
        _loss(run),
        *_task_losses(run),
        _speed(run),
        _efficiency(run),
        _prediction(run),
        _stages(run),
        _memory(run),
        _shapes(run),
    ]
    return [chart for chart in made if chart.traces]


def length_chart(lengths: Mapping[str, Mapping[int, int]]) -> Chart:
    """Samples by tokens (the lower end of a bin) of every task."""
    traces = [
        {"type": "scatter", "mode": "lines", "line": {"shape": "hv"}, "name": task, "x": list(bins),
         "y": list(bins.values())}
        for task, bins in lengths.items()
    ]  # fmt: skip
    layout = {"xaxis": {"title": "tokens of input and target", "type": "log"}, "yaxis": {"title": "samples"}}
    return Chart(name="lengths", title="Lengths by task", note="Of the whole dataset.", traces=traces, layout=layout)


def comparison_chart(speeds: Mapping[str, float]) -> Chart:
    """Tokens per second by method, as `compare` predicts them."""
    trace = {"type": "bar", "orientation": "h", "y": list(speeds), "x": list(speeds.values()), "name": "tokens/s"}
    return Chart(
        name="methods",
        title="What other methods would do",
        note="Predicted tokens per second, geometric mean over the batches compared; a method without plan has no bar.",
        traces=[trace | {"texttemplate": "%{x:,.0f}", "textposition": "auto", "marker": {"color": FORWARD}}],
        layout={"xaxis": {"title": "tokens/s, predicted"}, "yaxis": {"autorange": "reversed"}},
    )


def thinned(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most `MOST_POINTS` points: means over equally many neighbours, at the first one's place."""
    stride = -(-len(xs) // MOST_POINTS) or 1
    starts = range(0, len(xs), stride)
    means = [sum(ys[at : at + stride]) / len(ys[at : at + stride]) for at in starts]
    return [xs[at] for at in starts], [float(f"{mean:.6g}") for mean in means]


def _line(name: str, xs: Sequence[int], ys: Sequence[float], **more: Any) -> dict[str, Any]:
    x, y = thinned(xs, ys)
    mode = "lines+markers" if len(x) <= 60 else "lines"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def _numbers(run: Run) -> list[int]:
    """Iterations as Megatron counts them, from 1."""
    return [each.iteration + 1 for each in run.iterations]


def _by_iteration(y: str) -> dict[str, Any]:
    return {"xaxis": {"title": "iteration"}, "yaxis": {"title": y}}


def _loss(run: Run) -> Chart:
    traces = [
        _line(name, [iteration + 1 for iteration in values], list(values.values()))
        for name, values in run.losses.items()
    ]
    return Chart(name="loss", title="Loss", note="Mean over tokens.", traces=traces, layout=_by_iteration("loss"))


def _task_losses(run: Run) -> list[Chart]:
    """A chart for each split that was evaluated: the whole, and every task that had tokens."""
    charts = []
    for split, losses in run.evaluations.items():
        traces = [_line(name, list(values), list(values.values())) for name, values in losses.items() if values]
        title, note = f"Evaluation: {split}", "Mean over tokens, whole and by task; a click on a name hides its line."
        layout = _by_iteration("loss")
        charts.append(Chart(name=f"loss-{split}", title=title, note=note, traces=traces, layout=layout))
    return charts


def _speed(run: Run) -> Chart:
    speeds = [each.totals.real_tokens / max(whole_ns(each) / 1e9, 1e-9) for each in run.iterations]
    traces = [_line("tokens/s", _numbers(run), speeds, line={"color": BETWEEN})]
    note = "Real tokens over the time of an iteration's list and of its wait for the plan; the optimizer is not in it."
    return Chart(name="speed", title="Tokens per second", note=note, traces=traces, layout=_by_iteration("tokens/s"))


def _efficiency(run: Run) -> Chart:
    shares = [100 * each.totals.padding_efficiency for each in run.iterations]
    layout = _by_iteration("%")
    layout["yaxis"]["range"] = [0, 102]
    note = "Real tokens among all positions: 100% is no padding."
    traces = [_line("padding efficiency", _numbers(run), shares, line={"color": FORWARD})]
    return Chart(name="padding", title="Padding efficiency", note=note, traces=traces, layout=layout)


def _prediction(run: Run) -> Chart:
    measured = [each.measured_ns / NS_PER_MS for each in run.iterations]
    predicted = [each.predicted_ns / NS_PER_MS for each in run.iterations]
    return Chart(
        name="prediction",
        title="Predicted and measured time",
        note="Of an iteration's list, on the slowest replica; the first one pays for starting up.",
        traces=[
            _line("measured", _numbers(run), measured, line={"color": BACKWARD}),
            _line("predicted", _numbers(run), predicted, line={"color": FORWARD, "dash": "dot"}),
        ],
        layout=_by_iteration("ms"),
    )


def _stages(run: Run) -> Chart:
    medians = stage_medians(run)
    parts = (
        ("forward", FORWARD), ("backward", BACKWARD), ("bubble", BUBBLE), ("transfer", TRANSFER), ("other", OTHER),
        ("plan_wait", PLAN_WAIT), ("between", BETWEEN),
    )  # fmt: skip
    labels = {
        "bubble": "bubble: peer not ready", "transfer": "transfer wait", "other": "loads and frees",
        "plan_wait": "plan wait", "between": "optimizer, reduction, log",
    }  # fmt: skip
    traces = [
        {"type": "bar", "name": labels.get(part, part), "x": [each.stage for each in medians],
         "y": [round(getattr(each, part) / NS_PER_MS, 4) for each in medians], "marker": {"color": colour},
         "hovertemplate": "stage %{x}: %{y:.3g} ms"}
        for part, colour in parts
    ] if medians else []  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"title": "stage", **_whole(len(medians))}, "yaxis": {"title": "ms"}}
    note = "Medians per iteration. Bubble and transfer are told apart by the recorded timelines."
    return Chart(name="stages", title="Where time went", note=note, traces=traces, layout=layout)


def _memory(run: Run) -> Chart:
    if not run.stages:
        return Chart(name="memory", title="", traces=[])
    at = list(run.stages)
    records = list(run.stages.values())
    state = list(run.run.model_state_bytes) if run.run else []
    counted = len(state) == len(at)
    planned = [max(each.planned_activation_bytes for each in stage) for stage in records]
    bars = [("planned activations", planned, FORWARD)]
    if counted:
        bars.insert(0, ("model state", state, BETWEEN))
    traces = [
        {"type": "bar", "name": name, "x": at, "y": _mb(values), "marker": {"color": colour},
         "hovertemplate": "stage %{x}: %{y:,.0f} MB"}
        for name, values, colour in bars
    ]  # fmt: skip
    for name, field_name, symbol in (
        ("held by the allocator", "reserved_bytes", "diamond"),
        ("tensors at their peak", "allocated_bytes", "circle"),
    ):
        most = [max(getattr(each, field_name) for each in stage) for stage in records]
        if any(most):
            marker = {"symbol": symbol, "size": 9, "color": BACKWARD}
            traces.append(
                {"type": "scatter", "mode": "markers", "name": name, "x": at, "y": _mb(most), "marker": marker}
            )
    if run.run:
        limit = run.run.memory_limit_bytes
        ends = [min(at) - 0.5, max(at) + 0.5]
        traces.append(
            {"type": "scatter", "mode": "lines", "name": f"limit: {limit / BYTES_PER_MB:,.0f} MB", "x": ends,
             "y": _mb([limit, limit]), "line": {"color": LIMIT, "dash": "dash"}, "hoverinfo": "name"}
        )  # fmt: skip
    layout = {"barmode": "stack", "xaxis": {"title": "stage", **_whole(len(at))}, "yaxis": {"title": "MB"}}
    note = "The most of any iteration." + ("" if counted else " Model state is not counted here.")
    return Chart(name="memory", title="Memory by stage", note=note, traces=traces, layout=layout)


def _shapes(run: Run) -> Chart:
    counts = Counter(shape for each in run.iterations for shape in each.shapes)
    common = counts.most_common(MOST_SHAPES)
    most = common[0][1] if common else 1
    trace = {
        "type": "scatter", "mode": "markers", "name": "micro-batches",
        "x": [shape.input_length for shape, _ in common], "y": [shape.size for shape, _ in common],
        "text": [f"{_shape_text(shape)}<br>{count} micro-batches" for shape, count in common],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": [round(6 + 18 * (count / most) ** 0.5, 1) for _, count in common],
                   "color": [shape.target_length for shape, _ in common], "colorscale": "Viridis", "opacity": 0.75,
                   "showscale": any(shape.target_length for shape, _ in common),
                   "colorbar": {"title": {"text": "target<br>positions"}, "thickness": 12}},
    }  # fmt: skip
    left_out = f"; {len(counts) - len(common)} rare ones are left out" if len(counts) > len(common) else ""
    return Chart(
        name="shapes",
        title="Shapes of micro-batches",
        note=f"{len(counts)} distinct shapes{left_out}; larger dots are more frequent.",
        traces=[trace] if common else [],
        layout={"xaxis": {"title": "input positions"}, "yaxis": {"title": "rows", "rangemode": "tozero"}},
    )


def _shape_text(shape: Shape) -> str:
    target = f", {shape.target_length} target positions" if shape.target_length else ""
    return f"{shape.size} rows of {shape.input_length} input{target}"


def _whole(count: int) -> dict[str, Any]:
    """Ticks at whole numbers."""
    return {"dtick": 1} if count <= 16 else {}


def _mb(values: Sequence[int]) -> list[float]:
    return [round(value / BYTES_PER_MB, 2) for value in values]
