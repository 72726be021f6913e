"""From measurements to a cost model file."""

import datetime
import importlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_dynapipe import __version__
from megatron_dynapipe.checkout.version import found_version
from megatron_dynapipe.core.costs import LAYER_KINDS, Division, LayerKind
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import BYTES_PER_MB, LENGTH_MULTIPLE, NS_PER_MS, Recompute, Shape
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.check import validated_errors
from megatron_dynapipe.costing.document import FORMAT, UNITS
from megatron_dynapipe.costing.format import PACKED_FORMAT, CostFile, PackedEntry, PackedPart, Points, key_of, noise
from megatron_dynapipe.costing.tabulate import LONGEST_ROW, fitted_entry
from megatron_dynapipe.megatron.flags.machine import processor
from megatron_dynapipe.megatron.models.specs import core_attention, engine_attention
from megatron_dynapipe.megatron.profiling.division import HalvesByMode, Prefix
from megatron_dynapipe.megatron.profiling.layers import MeasuredModule
from megatron_dynapipe.megatron.profiling.packed import Tables as PackedTables
from megatron_dynapipe.megatron.profiling.profiler import Measurements
from megatron_dynapipe.megatron.profiling.setup import ProfileSetup

_STATE_BYTES = 2
"""Bytes that the format counts for a parameter, whatever its type."""

POOR = 0.08
VERY_POOR = 0.25
"""Errors of times, median and ninth decile, above which a profile is called poor."""

Provenance = dict[str, str | int | float | bool]


def cost_file(
    setup: ProfileSetup,
    parts: Mapping[str, MeasuredModule],
    measurements: Measurements,
    *,
    adapters: Adapters | None,
    modes: Sequence[Recompute],
    within: Shape,
    packed: Mapping[Recompute, PackedTables],
    halves: HalvesByMode,
    halves_of_rows: HalvesByMode,
    prefixes: Mapping[Recompute, Prefix],
    links: Mapping[str, Link],
    provenance: Provenance,
) -> CostFile:
    """The cost model that measurements make; its error bars are among its provenance.

    `adapters` are those that the layers were measured with. `packed` are the tables of packed rows by mode; without
    them they are derived when plans are made. `halves` say how layers' costs are divided, `halves_of_rows` in packed
    rows, `prefixes` what pieces cost more.

    Raises:
        CostModelError: something was not measured at all.
    """
    parameters: dict[str, int] = {name: parts[name].parameters for name in LAYER_KINDS if name in parts}
    parameters["embedding"] = parts["postprocess"].embedding_parameters
    if setup.shape.experts is not None:
        parameters["experts"] = parts.get("expert", parts["encoder"]).expert_parameters
    state = {name: count * _STATE_BYTES / BYTES_PER_MB for name, count in parameters.items()}
    trained = {} if adapters is None else _trained_mb(parts)
    entries = {}
    for mode in modes:
        entry = fitted_entry(
            _points(measurements, mode, setup, parts),
            tensor_parallel=setup.args.tensor_model_parallel_size,
            recompute=mode,
            model_state_mb=state,
            within=within,
            infeasible=_infeasible(measurements, mode),
        )
        rows = None
        if packed:
            rows = _packed_entry(packed[mode], prefixes.get(mode), _divisions(halves_of_rows, mode), setup)
        entries[key_of(setup.args.tensor_model_parallel_size, mode)] = msgspec.structs.replace(
            entry, trained_state_mb=trained, packed=rows, division=_divisions(halves, mode)
        )
    file = CostFile(
        format=PACKED_FORMAT if packed else FORMAT,
        name=f"{setup.family}_h{setup.shape.hidden}_{provenance['device']}".replace(" ", "-"),
        source="measured by `megatron-dynapipe profile`",
        device=str(provenance["device"]),
        units=UNITS,
        model={name: msgspec.Raw(json.dumps(value).encode()) for name, value in _model(setup, adapters).items()},
        keys=entries,
        provenance=provenance,
        links=dict(links),
        peak_covers_backward=True,
    )
    return msgspec.structs.replace(file, provenance=file.provenance | _error_bars(file))


def _trained_mb(parts: Mapping[str, MeasuredModule]) -> dict[LayerKind, float]:
    """Costs of a layer of each kind."""
    kinds = (kind for kind in LAYER_KINDS if kind in parts)
    return {kind: parts[kind].trained_parameters * _STATE_BYTES / BYTES_PER_MB for kind in kinds}


def _error_bars(file: CostFile) -> Provenance:
    return {
        f"cross_validated_{quantity}_{which}": round(getattr(error, which), 4)
        for quantity, error in validated_errors(file).items()
        for which in ("median", "p90")
    }


def verdict(file: CostFile, path: Path) -> str:
    """How well a profile predicts times that it was not fitted to, and what to do where that is poor."""
    median, p90 = (file.provenance.get(f"cross_validated_time_ms_{which}") for which in ("median", "p90"))
    if not isinstance(median, float) or not isinstance(p90, float):
        return "too few points were measured to say how good the fit is\nhint: measure longer (--budget-minutes)"
    text = f"times that the fit has not seen are predicted within {median:.1%} (median; nine tenths within {p90:.1%})"
    if (busy := noise(file)) is not None:
        return f"{text}, but the machine was busy: {busy}\nhint: end other programs and measure again"
    if median <= POOR and p90 <= VERY_POOR:
        return f"{text}: good"
    return (
        f"{text}: poor\nhint: end other programs, give each rank a core or a GPU of its own, and measure longer"
        f" (--budget-minutes); `megatron-dynapipe cost-model check {path}` judges a file"
    )


def describe(setup: ProfileSetup) -> Provenance:
    """Machine and versions of the measurement; the same on all ranks."""
    args = setup.args
    cuda = setup.device.type == "cuda"
    device = torch.cuda.get_device_name(setup.device) if cuda else processor()
    attention = args.attention_backend.name if engine_attention(args) else core_attention(args).value
    return {
        "device": device,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "attention": attention,
        "transformer_impl": args.transformer_impl,
        "ranks": torch.distributed.get_world_size(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        **({"transformer-engine": _engine_version()} if args.transformer_impl != "local" else {}),
        "megatron-core": found_version(),
        "megatron-dynapipe": __version__,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def _engine_version() -> str:
    return str(getattr(importlib.import_module("transformer_engine"), "__version__", "unknown"))


def _model(setup: ProfileSetup, adapters: Adapters | None) -> dict[str, Any]:
    shape = setup.shape
    parts = {"experts": shape.experts, "adapters": adapters, "eight_bits": shape.eight_bits or None}
    return {name: msgspec.to_builtins(part) for name, part in parts.items() if part is not None} | {
        "type": shape.family.value,
        **{name: getattr(shape, name) for name in ("hidden", "heads", "kv_channels", "ffn", "vocabulary", "dropout")},
        "sequence_parallel": setup.args.sequence_parallel,
    }


def _points(
    measurements: Measurements, mode: Recompute, setup: ProfileSetup, parts: Collection[str]
) -> dict[tuple[str, str], Points]:
    points: dict[tuple[str, str], Points] = {}
    for kind in (*(kind for kind in LAYER_KINDS if kind in parts), "postprocess"):
        surface = kind, Recompute.NONE if kind == "postprocess" else mode
        values = {point: values for (of, point), values in measurements.items() if of == surface and values}
        points["time_ms", f"{kind}.forward"] = {at: costs.forward_ns / NS_PER_MS for at, costs in values.items()}
        points["time_ms", f"{kind}.backward"] = {at: costs.backward_ns / NS_PER_MS for at, costs in values.items()}
        points["stored_activation_mb", kind] = {at: costs.stored_bytes / BYTES_PER_MB for at, costs in values.items()}
        points["peak_activation_mb", kind] = {at: costs.peak_bytes / BYTES_PER_MB for at, costs in values.items()}
    if setup.family.is_encoder_decoder:  # not measured: its size is known
        position_mb = _position_mb(setup)
        shapes = points["stored_activation_mb", "encoder"]
        points["stored_activation_mb", "encoder_output"] = {(b, s): b * s * position_mb for b, s in shapes}
    return points


def _divisions(halves: HalvesByMode, mode: Recompute) -> dict[LayerKind, Division]:
    return {kind: division for (kind, of_mode), (division, _) in halves.items() if of_mode is mode}


def _packed_entry(
    tables: PackedTables, prefix: Prefix | None, division: dict[LayerKind, Division], setup: ProfileSetup
) -> PackedEntry:
    parts = {
        quantity: {part: PackedPart(linear=linear, attention=attention) for part, (linear, attention) in table.items()}
        for quantity, table in tables.items()
    }
    if setup.family.is_encoder_decoder:
        output = {f"{positions}": positions * _position_mb(setup) for positions in (LENGTH_MULTIPLE, LONGEST_ROW)}
        parts["stored_activation_mb"]["encoder_output"] = PackedPart(linear=output)
    if prefix is not None:
        forward, backward, stored, peak = prefix
        for quantity, part, costs in (
            ("time_ms", "encoder.forward", forward / NS_PER_MS),
            ("time_ms", "encoder.backward", backward / NS_PER_MS),
            ("stored_activation_mb", "encoder", stored / BYTES_PER_MB),
            ("peak_activation_mb", "encoder", peak / BYTES_PER_MB),
        ):
            parts[quantity][part] = msgspec.structs.replace(parts[quantity][part], prefix=tuple(costs.tolist()))
    return PackedEntry(division=division, **parts)


def _position_mb(setup: ProfileSetup) -> float:
    return float(setup.shape.hidden * setup.dtype.itemsize / setup.shards / BYTES_PER_MB)


def _infeasible(measurements: Measurements, mode: Recompute) -> dict[str, list[tuple[int, ...]]]:
    limits: dict[str, list[tuple[int, ...]]] = {}
    for ((part, of_mode), point), values in measurements.items():
        if values is None and of_mode in (mode, Recompute.NONE if part == "postprocess" else mode):
            limits.setdefault(part, []).append(point)
    return limits
