"""Fitting a device's rates to a few measured points, so that the analytic model speaks for that device.

Every point gives several equations (forward and backward of every part), which are few and simple: a time is a sum of
work over rates, above a floor. Rates that the points say nothing of stay where they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from megatron_dynapipe.cost.analytic import DeviceRates, PeakRatios, layer_costs, peak_basis
from megatron_dynapipe.cost.format import CostFile, read_points
from megatron_dynapipe.cost.nnls import nonnegative_least_squares
from megatron_dynapipe.cost.work import Floats, LayerWork, ModelShape, Work
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import Recompute, Shape

_PRIOR = 0.1
"""Weight of a rate's value before calibration, against that of one measured time."""
_FLOORS = (0.0, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
_SHARPNESS = (2.0, 4.0, 8.0)
_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One part of a model, measured at one shape.

    `forward_ms` and `backward_ms` are times, `peak_mb` the forward's high-water mark (None for the head).
    """

    work: Work
    recompute: Recompute
    forward_ms: float
    backward_ms: float
    peak_mb: float | None = None


def measured_at(file: CostFile, key: str, at: Shape, model: ModelShape, *, sequence_parallel: bool) -> list[Measured]:
    """What a file has measured for one key at one shape, by part.

    Raises:
        CostModelError: the file lacks the key, or nothing was measured there.
    """
    if key not in file.keys:
        raise CostModelError(f"cost model {file.name} has no key {key!r}; it has {', '.join(sorted(file.keys))}")
    entry = file.keys[key]
    tables = read_points(entry.evidence, file.family, f"cost model {file.name}, key {key}")
    layer = LayerWork(shape=model, tensor_parallel=entry.tp, sequence_parallel=sequence_parallel)
    b, s, t = (np.array(float(n)) for n in at)
    last = at.target_length or at.input_length
    parts = {
        "encoder": (layer.encoder(b, s), (at.size, at.input_length)),
        "decoder": (layer.decoder(b, t, s), (at.size, at.input_length, at.target_length)),
        "postprocess": (layer.head(b, np.array(float(last))), (at.size, last)),
    }
    found = []
    for part, (work, point) in parts.items():
        forward, backward = (tables.get(("time_ms", f"{part}.{way}"), {}).get(point) for way in ("forward", "backward"))
        if forward and backward:
            peak = None if part == "postprocess" else tables["peak_activation_mb", part].get(point)
            mode = Recompute.NONE if part == "postprocess" else entry.recompute
            found.append(Measured(work=work, recompute=mode, forward_ms=forward, backward_ms=backward, peak_mb=peak))
    if not found:
        raise CostModelError(f"cost model {file.name}, key {key}: nothing was measured at {at}")
    return found


def calibrate(rates: DeviceRates, points: Sequence[Measured]) -> DeviceRates:
    """The rates that explain the points best, starting from `rates`.

    Raises:
        CostModelError: there are no points.
    """
    if not points:
        raise CostModelError("calibration needs at least one measured point, got none")
    prior = np.array([1 / rates.flops_per_second, 1 / rates.bytes_per_second, 1 / rates.link_bytes_per_second])
    terms = np.array([_terms(point.work) for point in points])
    kernels = np.array([point.work.kernels for point in points])
    forward = np.array([point.forward_ms for point in points]) / 1e3
    costs, floor, sharpness = _fit(terms, kernels, forward, prior, _SHARPNESS)
    fitted = _with(rates, costs, floor, sharpness)
    backward = np.array([_own_backward(point, fitted) for point in points])
    slopes = np.array([rates.backward_products, rates.backward_traffic, 1.0])
    more, backward_floor, _ = _fit(terms, kernels, backward, slopes * costs, (sharpness,))
    return msgspec.structs.replace(
        fitted,
        backward_products=float(more[0] / costs[0]),
        backward_traffic=float(more[1] / costs[1]),
        backward_overhead=float(backward_floor / floor) if backward_floor and floor else 1.0,
        peaks=_peaks(rates.peaks, points),
    )


def _with(rates: DeviceRates, costs: Floats, floor: float, sharpness: float) -> DeviceRates:
    flops, traffic, link = (float(1 / cost) for cost in costs)
    return msgspec.structs.replace(
        rates,
        flops_per_second=flops,
        bytes_per_second=traffic,
        link_bytes_per_second=link,
        layer_overhead_us=floor * 1e6,
        sharpness=sharpness,
    )


def _terms(work: Work) -> list[float]:
    products = work.linear_flops + work.core_flops
    return [float(products), float(work.kept_bytes + work.core_bytes), float(work.message_bytes)]


def _own_backward(point: Measured, rates: DeviceRates) -> float:
    """Seconds of the backward without the forward that it repeats; at least a tenth of it."""
    measured = point.backward_ms / 1e3
    none, repeated = (layer_costs(point.work, rates, mode)[1] for mode in (Recompute.NONE, point.recompute))
    return max(measured - float(repeated - none) / 1e9, measured / 10)


def _peaks(before: PeakRatios, points: Sequence[Measured]) -> PeakRatios:
    """Measured high-water marks over computed ones, under every mode that was measured."""
    ratios: dict[str, list[float]] = {}
    for point in points:
        if point.peak_mb:
            basis = float(peak_basis(point.work, point.recompute))
            ratios.setdefault(point.recompute.value, []).append(point.peak_mb * 1e6 / basis)
    return msgspec.structs.replace(before, **{mode: float(np.median(values)) for mode, values in ratios.items()})


def _fit(
    terms: Floats, kernels: Floats, seconds: Floats, prior: Floats, sharpnesses: Sequence[float]
) -> tuple[Floats, float, float]:
    """Costs per unit of each term, the floor per kernel and the sharpness, of least mean error in the logarithm."""
    best: tuple[float, Floats, float, float] | None = None
    least = float((seconds / kernels).min())
    for share in _FLOORS:
        for sharpness in sharpnesses:
            floors = share * least * kernels
            costs = _newton(terms, floors, seconds, prior, sharpness)
            predicted = _mean(terms @ costs, floors, sharpness)
            error = float(np.abs(np.log(predicted / seconds)).mean())
            if best is None or error < best[0] - 1e-9:
                best = error, costs, share * least, sharpness
    assert best is not None
    return best[1:]


def _newton(terms: Floats, floors: Floats, seconds: Floats, prior: Floats, sharpness: float) -> Floats:
    """Gauss–Newton on relative errors, in units of the prior, which pulls where the points are silent."""
    scaled = terms * prior / seconds[:, None]
    pull = _PRIOR * np.eye(len(prior))
    multiples = np.ones(len(prior))
    for _ in range(_STEPS):
        work = scaled @ multiples
        mean = _mean(work, floors / seconds, sharpness)
        slope = (work / mean) ** (sharpness - 1)
        rows = np.concatenate([slope[:, None] * scaled, pull])
        target = np.concatenate([1 - mean + slope * work, _PRIOR * np.ones(len(prior))])
        multiples = np.maximum(nonnegative_least_squares(rows, target), 0.01)
    return np.asarray(multiples * prior)


def _mean(work: Floats, floors: Floats, sharpness: float) -> Floats:
    return np.asarray((work**sharpness + floors**sharpness) ** (1 / sharpness))
