"""Two runs of the same samples from the same weights, one planned and one sample by sample: what differs, and where."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.tools.certify.parts import errors_by_name, relative_error, whole
from megatron_dynapipe.tools.certify.records import RankRecord, read_parts, read_records

FP32 = 1e-4
"""Largest relative difference of losses, norms and gradients, whose sums are in another order."""
STILL = 1e-5
"""Likewise of what must not move at all: kernels may take other shapes in other company."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the certificate: a largest difference, the most that is allowed, and where it is."""

    name: str
    error: float
    allowed: float
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether it does; a difference that is not a number does not."""
        return self.error <= self.allowed


def checks_fp32(planned: Path, reference: Path, *, device: str = "cpu") -> tuple[list[Check], dict[str, float]]:
    """The certificate of a run in fp32, and every parameter's relative gradient difference."""
    ranks, (alone,) = read_records(planned), read_records(reference)
    last = next(record for record in reversed(ranks) if record.losses)
    expected = whole(read_parts(reference, [alone], "gradients"))
    checks = [
        _sequence("losses", last.losses, alone.losses),
        _samples(ranks, alone),
        _sequence("gradient norms", last.norms, alone.norms),
    ]
    errors: dict[str, float] = {}
    try:
        actual = whole(read_parts(planned, ranks, "gradients"))
        errors = errors_by_name(actual, expected)
        worst = max(errors, key=lambda name: errors[name])
        where = worst
        if errors[worst] > FP32:
            rows = whole(read_parts(reference, [alone], "samples"))["samples"]
            where = _weights(actual, alone, rows, ranks) or _alone(worst, errors)
        checks.append(Check(name="gradients", error=errors[worst], allowed=FP32, where=where))
    except DataError as error:
        checks.append(Check(name="gradients", error=float("inf"), allowed=FP32, where=error.message))
    checks += _isolation(ranks)
    still = 0.0 if device == "cpu" else STILL
    checks.append(Check(name="determinism", error=max(record.repeated for record in ranks), allowed=still))
    checks.append(Check(name="recomputation", error=max(record.recomputed for record in ranks), allowed=STILL))
    return checks, errors


def checks_half(planned: Path, reference: Path, exact: Path, half: str) -> list[Check]:
    """In half precision a run is at most twice as far from fp32 as one process is, whichever order its samples have."""
    ranks, (alone,) = read_records(planned), read_records(reference)
    (truth,) = read_records(exact)
    expected = whole(read_parts(exact, [truth], "gradients"))
    orders = [whole(read_parts(reference, [alone], name)) for name in ("gradients", "reversed")]
    noise = max(_distance(order, expected) for order in orders)
    losses = [next(r for r in reversed(of) if r.losses).losses[:1] for of in (ranks, [alone], [truth])]
    rounding = torch.finfo(torch.bfloat16 if half == "bf16" else torch.float16).eps
    apart = [_sequence("losses", first, losses[-1]).error for first in losses[:-1]]
    actual = _distance(whole(read_parts(planned, ranks, "gradients"), tolerance=1e-2), expected)
    return [
        Check(name=f"losses in {half}", error=apart[0], allowed=max(2 * apart[1], rounding)),
        Check(name=f"gradients in {half}", error=actual, allowed=2 * noise),
    ]


def _distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    both = (torch.cat([of[name].flatten() for name in sorted(expected)]) for of in (actual, expected))
    return relative_error(*both)


def _sequence(name: str, actual: Sequence[float], expected: Sequence[float]) -> Check:
    """The largest relative difference of two runs' numbers of iterations."""
    if len(actual) != len(expected):
        where = f"{len(actual)} iterations against {len(expected)}"
        return Check(name=name, error=float("inf"), allowed=FP32, where=where)
    errors = [abs(a - e) / max(abs(e), 1e-30) for a, e in zip(actual, expected, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Check(name=name, error=errors[worst], allowed=FP32, where=f"iteration {worst + 1}")


def _samples(ranks: Sequence[RankRecord], alone: RankRecord) -> Check:
    """The losses of single samples in the first iteration."""
    actual: dict[int, tuple[float, float]] = {}
    places: dict[int, str] = {}
    for record in ranks:
        places |= record.places
        for sample, (loss, tokens) in record.samples.items():
            before = actual.get(sample, (0.0, 0.0))
            actual[sample] = before[0] + loss, before[1] + tokens
    worst, where = 0.0, ""
    for sample, (loss, tokens) in alone.samples.items():
        got = actual.get(sample, (0.0, 0.0))
        error = float("inf") if got[1] != tokens else abs(got[0] - loss) / max(abs(loss), 1e-30)
        if error >= worst:
            counted = f": {got[1]:.0f} of {tokens:.0f} tokens count" if got[1] != tokens else ""
            worst, where = error, f"sample {sample}, {places.get(sample, 'not planned')}{counted}"
    return Check(name="losses by sample", error=worst, allowed=FP32, where=where)


def _isolation(ranks: Sequence[RankRecord]) -> list[Check]:
    """How far samples move when others' tokens are replaced: at the end of the first, the middle, the last stages."""
    moved = {stage: max(r.moved[stage] for r in ranks if stage in r.moved) for r in ranks for stage in r.moved}
    last = max(moved, default=0)
    groups = {"first stage": [0], "middle stages": range(1, last), "last stage": [last]}
    checks = []
    for name, stages in groups.items():
        found = [(*moved[stage], stage) for stage in stages if stage in moved and (stage or not last or name[0] == "f")]
        if found:
            error, where, stage = max(found)
            where = where if error <= STILL else f"stage {stage}: {where}, moves as others change"
            checks.append(Check(name=f"isolation, {name}", error=error, allowed=STILL, where=where))
    return checks


def _alone(worst: str, errors: dict[str, float]) -> str:
    """Which parameter is off, and whether it is the only one."""
    others = sum(error > FP32 for error in errors.values()) - 1
    return f"{worst} and {others} other parameters" if others else f"{worst} alone: the sum over its copies"


def _weights(actual: dict[str, Tensor], alone: RankRecord, rows: Tensor, ranks: Sequence[RankRecord]) -> str:
    """How often samples count in a gradient that is a sum of theirs after all; else nothing.

    The gradients of vectors such as norms are solved for the weights of the samples, which are 1 in a right one.
    """
    tokens = sum(count for _, count in alone.samples.values())
    gradient = torch.cat([actual[name].flatten() for name in alone.small]).double() * tokens
    numbers = list(dict.fromkeys(alone.order))
    columns = torch.zeros(len(gradient), len(numbers), dtype=torch.float64)
    for number, row in zip(alone.order, rows, strict=True):
        columns[:, numbers.index(number)] += row.double()
    weights = torch.linalg.lstsq(columns, gradient, driver="gelsd").solution
    if len(numbers) >= len(gradient) or relative_error(columns @ weights, gradient) > 1e-3:
        return ""
    by_sample = dict(zip(numbers, weights.tolist(), strict=True))
    groups: dict[str, list[int]] = {}
    for record in ranks:
        groups[f"samples of replica {record.replica}"] = list(record.places)
    off = {sample for sample, weight in by_sample.items() if abs(weight - 1) > 0.05}
    for name, samples in groups.items():
        if samples and off == set(samples) and _spread(of := [by_sample[sample] for sample in samples]) < 0.05:
            return f"{name} count {of[0]:.2f} times"
    low, high = min(by_sample.values()), max(by_sample.values())
    if len(off) == 1:
        return f"sample {next(iter(off))} counts {by_sample[next(iter(off))]:.2f} times"
    return f"samples count {low:.2f} to {high:.2f} times: means of means" if off else ""


def _spread(values: Iterable[float]) -> float:
    kept = list(values)
    return max(kept) - min(kept)
