"""Tuned layouts as text: a table, those that are as good as the best, why usual ones are not, and what plans gain."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from megatron_dynapipe.tools.tuning import TunedLayout, Tuning, fastest_of

ERROR = 0.084
"""The median error of predictions of layouts (benchmarks/cost_accuracy)."""
NOTHING = 0.02
"""A gain below this is none: rows and plans that are as near differ by less than predictions tell."""
WIDTH = 120
_NAMED = 3
_MISSED = 0.01
"""A layout that lacks so little of its memory is called out."""
_SHORT = 8
_TABLE = "{:12}{:>9}{:>11}{:>10}{:>5}{:>12}{:>6}{:>15}  {:15}  {}"
_COLUMNS = ("layout", "time, ms", "reduction", "tokens/s", "MFU", "memory, MB", "idle", "micro-batches", "recompute")
_MEMORY = re.compile(r"(?:batch \d+: )?(stage \d+) needs ([\d.]+) MB (.*), of ([\d.]+) MB")


def heading() -> str:
    """The names of the table's columns."""
    return _TABLE.format(*_COLUMNS, "layers")


def row_of(layout: TunedLayout) -> str:
    """A layout that was planned, as a row of the table."""
    assert layout.predicted_ms is not None and layout.reduction_ms is not None
    note = "" if layout.status == "planned" else f"  batches planned: {layout.batches}"
    if layout.measured_ms is not None:
        note = f"  measured: {layout.measured_ms:.1f} ms"
    elif layout.measurement_error is not None:
        note = "  not measured, see below"
    row = _TABLE.format(
        _sizes_of(layout),
        f"{layout.predicted_ms:.1f}",
        f"{layout.reduction_ms:.1f}",
        f"{layout.tokens_per_second:.0f}",
        "–" if layout.mfu is None else f"{layout.mfu:.0%}",
        f"{max(layout.peak_memory_mb):.0f}",
        f"{layout.idle:.0%}",
        f"{layout.micro_batches:.0f}",
        layout.recompute.replace("selective", "sel."),
        layers_of(layout) + note,
    )
    experts = f"  (experts over {layout.expert_parallel})" if layout.expert_parallel > 1 else ""
    room = WIDTH - len(experts)
    return (row if len(row) <= room else row[: room - 1] + "…") + experts


def layers_of(layout: TunedLayout) -> str:
    """The layers of virtual stages: one by one where they are few, else runs of equal ones, as `48×1, 16×2`."""
    split = layout.layers_per_stage or ()
    if len(set(split)) == 1:
        return f"{split[0]:g} each"
    if len(split) <= _SHORT:
        return ",".join(f"{layers:g}" for layers in split)
    runs = ((layers, len([*run])) for layers, run in groupby(split))
    return ", ".join(f"{count}×{layers:g}" if count > 1 else f"{layers:g}" for layers, count in runs)


def unusable(layouts: Sequence[TunedLayout]) -> list[str]:
    """Why layouts cannot be used, a line for each reason; before them those that lack little memory."""
    missed: list[str] = []
    reasons: dict[str, list[str]] = {}
    for layout in layouts:
        reason = layout.error or ""
        if (memory := _MEMORY.fullmatch(reason)) is not None:
            needs, has = float(memory[2]), float(memory[4])
            reason = f"a stage needs more than {memory[4]} MB {memory[3]}"
            if needs <= has * (1 + _MISSED):
                lacks = f"{needs - has:.0f} MB ({(needs - has) / has:.1%})"
                missed.append(f"{name_of(layout)} lacks {lacks}: {memory[1]} needs {memory[2]} MB {memory[3]}")
        reasons.setdefault(reason, []).append(name_of(layout))
    return [*missed, *(f"cannot be used: {', '.join(dict.fromkeys(who))}: {why}" for why, who in reasons.items())]


def gain_of(tuning: Tuning, names: Mapping[str, str]) -> list[str]:
    """What plans gain over the best of other trainers' rows, each on its own best layout, and over Bridge's.

    Args:
        tuning: with rivals.
        names: rivals' names, as people know them.
    """
    best = tuning.layouts[0]
    fastest = fastest_of(tuning.rivals)
    if best.predicted_ms is None or fastest is None or tuning.gain is None:
        return []
    name, rival = fastest
    both = (
        f"{best.predicted_ms:.1f} ms on {name_of(best)}, {names.get(name, name)} {rival.predicted_ms:.1f} ms on"
        f" {name_of(rival)}"
    )
    if abs(tuning.gain - 1) < NOTHING:
        lines = [f"plans gain nothing here ({tuning.gain:.2f} ×): {both}, the best layout of each"]
    elif tuning.gain < 1:
        lines = [f"plans are slower here ({tuning.gain:.2f} ×): {both}, the best layout of each: pack rows instead"]
    else:
        lines = [f"plans are {tuning.gain:.2f} times as fast: {both}, the best layout of each"]
    bridge = tuning.rivals.get("bridge")
    if bridge is not None and name != "bridge":
        ratio = (bridge.predicted_ms or 0.0) / best.predicted_ms
        lines.append(f"over {names['bridge']} on their best layout, {name_of(bridge)}: {ratio:.2f}")
    staged = next((one for one in tuning.layouts if one.status == "planned" and one.pipeline_parallel > 1), None)
    fastest = fastest_of(tuning.rivals_with_stages)
    if staged is not None and staged.predicted_ms is not None and fastest is not None:
        ratio = (fastest[1].predicted_ms or 0.0) / staged.predicted_ms
        lines.append(
            f"with stages, on {name_of(staged)}, for a model or a batch that needs them: {ratio:.2f}"
            f" ({staged.predicted_ms:.1f} and {fastest[1].predicted_ms:.1f} ms)"
        )
    return lines


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
            more = [f"slower by {'' if layout.predicted_ms else 'at least '}{takes / best.predicted_ms - 1:.1%}"]
            if (apart := (layout.reduction_ms or 0.0) - (best.reduction_ms or 0.0)) >= 0.05:
                more.append(f"reduces gradients for {apart:.1f} ms longer")
            if layout.idle is not None and best.idle is not None and layout.idle > best.idle:
                more.append(f"idle for {layout.idle:.0%} of the time, the best for {best.idle:.0%}")
            if layout.recompute not in ("", best.recompute):
                more.append(f"recomputation {layout.recompute}, the best {best.recompute}")
            lines.append(f"{kind}, {name_of(layout)}: {', '.join(more)}")
    return lines


def name_of(layout: TunedLayout) -> str:
    """Its parallel sizes in short: data·tensor·pipeline×chunks."""
    experts = f" with experts over {layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    return _sizes_of(layout) + experts


def _sizes_of(layout: TunedLayout) -> str:
    chunks = f"×{layout.chunks}" if layout.chunks > 1 else ""
    return f"{layout.data_parallel}·{layout.tensor_parallel}·{layout.pipeline_parallel}{chunks}"
