"""Tuned layouts as text: a table's rows, those that are as good as the best, and why usual ones are not."""

from collections.abc import Sequence

from megatron_dynapipe.tools.tuning import TunedLayout, Tuning

ERROR = 0.084
"""By which predictions of layouts are off, in the median (benchmarks/cost_accuracy)."""
_NAMED = 3
_TABLE = "{:>5}{:>7}{:>9}{:>7}  {:>10}{:>11}{:>10}{:>6}{:>12}{:>6}{:>15}  {:15}{:24}{}"
_COLUMNS = (
    *("data", "tensor", "pipeline", "chunks", "time, ms", "reduction", "tokens/s", "MFU", "memory, MB", "idle"),
    *("micro-batches", "recompute", "", "layers"),
)


def heading() -> str:
    """The names of the table's columns."""
    return _TABLE.format(*_COLUMNS).rstrip()


def row_of(layout: TunedLayout) -> str:
    """A layout that was planned, as a row of the table."""
    assert layout.predicted_ms is not None and layout.reduction_ms is not None
    shared = f"experts over {layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    note = shared if layout.status == "planned" else f"batches planned: {layout.batches}"
    if layout.measured_ms is not None:
        note = f"measured: {layout.measured_ms:.1f} ms"
    elif layout.measurement_error is not None:
        note = "not measured, see below"
    layer_split = layout.layers_per_stage or ()
    layers = f"{layer_split[0]} each" if len(set(layer_split)) == 1 else ",".join(map(str, layer_split))
    return _TABLE.format(
        layout.data_parallel,
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.chunks,
        f"{layout.predicted_ms:.1f}",
        f"{layout.reduction_ms:.1f}",
        f"{layout.tokens_per_second:.0f}",
        "–" if layout.mfu is None else f"{layout.mfu:.0%}",
        f"{max(layout.peak_memory_mb):.0f}",
        f"{layout.idle:.0%}",
        f"{layout.micro_batches:.0f}",
        layout.recompute,
        note,
        layers,
    )


def close_ones(planned: Sequence[TunedLayout]) -> list[str]:
    """Layouts that are not told from the best, by the error of predictions."""
    least = planned[0].predicted_ms or 1.0 if planned else 1.0
    more = {name_of(other): (other.predicted_ms or 0.0) / least - 1 for other in planned[1:]}
    near = [f"{name} (+{share:.1%})" for name, share in more.items() if share <= ERROR]
    if not near:
        return []
    rest = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
    return [
        f"within {ERROR:.0%} of the best, by which predictions of layouts are off in the median:"
        f" {', '.join(near[:_NAMED])}{rest}; measure them before you choose (--validate, or a few iterations of each)"
    ]


def usual_ones(tuning: Tuning, devices: int, per_node: int) -> list[str]:
    """Why layouts that are tried first by hand are behind: replicas alone, and tensor parallelism inside a node."""
    best = tuning.layouts[0]
    if best.predicted_ms is None:
        return []
    tensor = min(per_node, devices)
    usual = {(devices, 1, 1): "replicas alone", (1, tensor, devices // tensor): "tensor parallel in a node"}
    lines = []
    for layout in tuning.layouts[1:]:
        sizes = layout.data_parallel, layout.tensor_parallel, layout.pipeline_parallel
        if layout.error is None and layout.chunks == 1 and (kind := usual.pop(sizes, None)) is not None:
            takes = layout.predicted_ms or layout.bound_ms or 0.0
            more = [f"{'' if layout.predicted_ms else 'at least '}{takes / best.predicted_ms:.2f} times as long"]
            if (apart := (layout.reduction_ms or 0.0) - (best.reduction_ms or 0.0)) >= 0.05:
                more.append(f"{apart:.1f} ms more of reduction")
            if layout.idle is not None and best.idle is not None and layout.idle > best.idle:
                more.append(f"idle for {layout.idle:.0%} in place of {best.idle:.0%}")
            if layout.recompute not in ("", best.recompute):
                more.append(f"recomputes {layout.recompute} in place of {best.recompute}")
            lines.append(f"{kind}, {name_of(layout)}: {', '.join(more)}")
    return lines


def name_of(layout: TunedLayout) -> str:
    """Its parallel sizes in short: data·tensor·pipeline×chunks."""
    chunks = f"×{layout.chunks}" if layout.chunks > 1 else ""
    experts = f" with experts over {layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    return f"{layout.data_parallel}·{layout.tensor_parallel}·{layout.pipeline_parallel}{chunks}{experts}"
