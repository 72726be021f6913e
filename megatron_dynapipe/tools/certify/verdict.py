"""Two runs of the same samples from the same weights, one planned and one sample by sample: what differs, and where."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.tools.certify.parts import above_rounding, errors_by_name, relative_error, whole
from megatron_dynapipe.tools.certify.records import (
    GRADIENTS,
    REVERSED,
    SAMPLES,
    UPDATES,
    RankRecord,
    read_parts,
    read_records,
)

SUMS = 1e-4
"""Largest relative difference of losses, norms and gradients in fp32, whose sums are in another order."""
STEPS = 1e-3
"""Largest relative difference of what steps make."""
SURE = 1e-2
"""An element of an update counts only if its first gradient is at least this part of its parameter's, or exactly 0.

Adam divides a gradient by its own size. One that is nothing but rounding, 1e-6 of the sums that cancelled, moves its
weight as far as any other, in a direction of its own. Those that count are exact to 1e-6 / `SURE`; a decay that is left
out is 2e-2 of an update (`flags.RATES`), and a wrong rate or mean of gradients is more.
"""
STILL = 1e-5
"""Likewise of what must not move at all: kernels may take other shapes in other company, and GPUs' backward kernels of
attention and of embeddings add up by atomic operations, in another order each time."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the certificate: a largest difference, the most that is allowed, and where it is."""

    name: str
    error: float
    allowed: float = SUMS
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether it does; a difference that is not a number does not."""
        return self.error <= self.allowed


def checks_fp32(planned: Path, reference: Path) -> tuple[list[Check], dict[str, float]]:
    """The certificate of a run in fp32, and every parameter's relative gradient difference."""
    ranks = read_records(planned)
    (alone,) = read_records(reference)
    gradients, errors = _gradients(planned, reference)
    still = 0.0 if alone.device == "cpu" else STILL
    return [
        of_iterations("losses", losses_of(ranks), alone.losses),
        _samples(ranks, alone),
        of_iterations("gradient norms", ranks[-1].norms, alone.norms),
        gradients,
        *of_steps(planned, reference),
        *_isolation(ranks),
        _moved("determinism", [record.repeated for record in ranks], still),
        _moved("recomputation", [record.recomputed for record in ranks], STILL),
    ], errors


def checks_half(planned: Path, reference: Path, exact: Path, half: str) -> list[Check]:
    """In half precision a run is at most twice as far from fp32 as one process is, whichever order its samples have."""
    ranks = read_records(planned)
    (alone,) = read_records(reference)
    (truth,) = read_records(exact)
    expected = whole(read_parts(exact, GRADIENTS))
    noise = max(_distance(whole(read_parts(reference, name)), expected) for name in (GRADIENTS, REVERSED))
    actual = _distance(whole(read_parts(planned, GRADIENTS), tolerance=1e-2), expected)
    return [
        of_first(f"losses in {half}", losses_of(ranks), alone.losses, truth.losses, half),
        Check(name=f"gradients in {half}", error=actual, allowed=2 * noise),
    ]


def of_first(name: str, actual: Sequence[float], alone: Sequence[float], exact: Sequence[float], half: str) -> Check:
    """A number of the first iteration: as `checks_half`, or rounded in half precision."""
    error, expected = (of_iterations("", of[:1], exact[:1]).error for of in (actual, alone))
    rounding = torch.finfo(torch.bfloat16 if half == "bf16" else torch.float16).eps
    return Check(name=name, error=error, allowed=max(2 * expected, rounding))


def losses_of(ranks: Sequence[RankRecord]) -> list[float]:
    """The losses of a run, which its last stages have."""
    return next(record.losses for record in reversed(ranks) if record.losses)


def _distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    names = sorted(expected)
    actual_vector = torch.cat([actual[name].flatten() for name in names])
    expected_vector = torch.cat([expected[name].flatten() for name in names])
    return relative_error(actual_vector, expected_vector)


def of_iterations(name: str, actual: Sequence[float], expected: Sequence[float]) -> Check:
    """The largest relative difference of two runs' numbers of iterations."""
    errors = [_difference(a, e) for a, e in zip(actual, expected, strict=True)]
    worst = max(errors)
    at = errors.index(worst)
    where = f"iteration {at + 1}"
    if math.isinf(worst):
        where += f": not a number (planned {actual[at]}, reference {expected[at]})"
    return Check(name=name, error=worst, where=where)


def _difference(actual: float, expected: float) -> float:
    """Relative difference of two numbers; infinite where either is not one."""
    error = abs(actual - expected) / max(abs(expected), 1e-30)
    return error if math.isfinite(error) else math.inf


def _moved(name: str, ranks: Sequence[tuple[float, str]], allowed: float) -> Check:
    """The gradient that moved most."""
    error, parameter = max(ranks)
    return Check(name=name, error=error, allowed=allowed, where=parameter if error else "")


def _samples(ranks: Sequence[RankRecord], alone: RankRecord) -> Check:
    """The losses of single samples in the first iteration."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    places: dict[int, str] = {}
    for record in ranks:
        places.update(record.places)
        for sample, (loss, tokens) in record.samples.items():
            sums[sample][0] += loss
            sums[sample][1] += tokens
    worst = -1.0
    where = ""
    for sample, (expected, tokens) in alone.samples.items():
        loss, counted = sums[sample]
        error = _difference(loss, expected) if counted == tokens else math.inf
        if error > worst:
            miscounted = f": {counted:.0f} of {tokens:.0f} tokens count" if counted != tokens else ""
            worst = error
            where = f"sample {sample}, {places.get(sample, 'not planned')}{miscounted}"
    return Check(name="losses by sample", error=worst, where=where)


def _isolation(ranks: Sequence[RankRecord]) -> list[Check]:
    """How far samples move when others' tokens are replaced: at the end of the first, the middle, the last stages."""
    moved: dict[int, tuple[float, str]] = {}
    for record in ranks:
        for stage, furthest in record.moved.items():
            moved[stage] = max(furthest, moved.get(stage, furthest))
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for stage, (error, sample) in sorted(moved.items()):
        if stage == max(moved):
            name = "last stage"
        elif stage:
            name = "middle stages"
        else:
            name = "first stage"
        where = sample if error <= STILL else f"stage {stage}: {sample} moves as others change"
        groups[name].append((error, where))
    checks = []
    for name, group in groups.items():
        worst, where = max(group)
        checks.append(Check(name=f"isolation, {name}", error=worst, allowed=STILL, where=where))
    return checks


def _gradients(planned: Path, reference: Path) -> tuple[Check, dict[str, float]]:
    expected = whole(read_parts(reference, GRADIENTS))
    try:
        actual = whole(read_parts(planned, GRADIENTS))
    except DataError as error:
        return Check(name="gradients", error=float("inf"), where=error.message), {}
    errors = errors_by_name(actual, expected)
    worst = where = max(errors, key=lambda name: errors[name])
    if math.isinf(errors[worst]):
        where = f"{worst}: not a number"
    elif errors[worst] > SUMS:
        others = sum(error > SUMS for error in errors.values()) - 1
        plain = f"{worst} and {others} other parameters" if others else f"{worst} alone: the sum over its copies"
        where = _weights(actual, planned, reference) or plain
    return Check(name="gradients", error=errors[worst], where=where), errors


def of_steps(planned: Path, reference: Path) -> list[Check]:
    """How far every parameter has moved after the last step, and the optimizer's means of its gradients."""
    gradients = above_rounding(whole(read_parts(reference, GRADIENTS)))
    sure = {name: _is_sure(gradient) for name, gradient in gradients.items()}
    (alone,) = read_records(reference)
    checks = []
    for kind in alone.parts:
        if kind in (GRADIENTS, SAMPLES):
            continue
        parts = read_parts(planned, kind)
        expected = whole(read_parts(reference, kind))
        if others := {part[0] for of_rank in parts for part in of_rank} ^ expected.keys():
            where = f"{min(others)} is trained by one of the two runs"
            checks.append(Check(name=kind, error=float("inf"), allowed=STEPS, where=where))
            continue
        try:
            sure_parts = [[part for part in of_rank if part[0] in sure] for of_rank in parts]
            actual = whole(sure_parts, tolerance=STEPS)
        except DataError as error:
            checks.append(Check(name=kind, error=float("inf"), allowed=STEPS, where=error.message))
            continue
        expected = {name: tensor for name, tensor in expected.items() if name in sure}
        if kind == UPDATES:
            actual = {name: tensor[sure[name]] for name, tensor in actual.items()}
            expected = {name: tensor[sure[name]] for name, tensor in expected.items()}
        checks.append(_step(kind, actual, expected))
    return checks


def _is_sure(gradient: Tensor) -> Tensor:
    """Which elements of a gradient are so large that their update counts, or exactly zero; see `SURE`."""
    root_mean_square = gradient.square().mean().sqrt()
    return (gradient == 0) | (gradient.abs() >= SURE * root_mean_square)


def _step(kind: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Check:
    """The worst parameter; on a miss, how large what it has is along what it should have."""
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = where = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= STEPS:
        others = sum(not error <= STEPS for error in errors.values()) - 1
        has = actual[worst].flatten().double()
        should = expected[worst].flatten().double()
        times = float(has @ should / (should @ should).clamp_min(1e-300))
        where = f"{worst} and {amount(others, 'other parameter')}: {times:.2f} times what it should be"
    return Check(name=kind, error=errors[worst], allowed=STEPS, where=where)


def _weights(actual: Mapping[str, Tensor], planned: Path, reference: Path) -> str:
    """How often samples count in a gradient that is a sum of theirs after all; else nothing.

    Gradients of norms are solved for the weights of the samples, which are 1 in a right one.
    """
    ranks = read_records(planned)
    (alone,) = read_records(reference)
    norms = [actual[name].flatten() for name in sorted(actual) if "norm" in name]
    gradient = torch.cat(norms).double()
    numbers = list(alone.samples)
    all_tokens = sum(tokens for _, tokens in alone.samples.values())
    columns = torch.zeros(len(gradient), len(numbers), dtype=torch.float64)
    for _, (number,), _, row in read_parts(reference, SAMPLES)[0]:
        columns[:, numbers.index(number)] += row.double() / all_tokens
    weights = torch.linalg.lstsq(columns, gradient[:, None], driver="gelsd").solution.flatten()
    if relative_error(columns @ weights, gradient) > 1e-3:
        return ""
    off = {number: weight for number, weight in zip(numbers, weights.tolist(), strict=True) if abs(weight - 1) > 0.05}
    if not off:
        return ""
    low = min(off.values())
    high = max(off.values())
    replica = _replica_of(off.keys(), numbers, ranks)
    if replica and high - low < 0.05:
        return f"samples of {replica} count {low:.2f} times"
    return f"{len(off)} samples count {low:.2f} to {high:.2f} times: means of means"


def _replica_of(some: Set[int], numbers: Sequence[int], ranks: Sequence[RankRecord]) -> str:
    """The replica that ran some of the samples and no others; "" if there is none."""
    members: dict[str, set[int]] = defaultdict(set)
    for record in ranks:
        for sample, place in record.places.items():
            ran_on = re.search(r"replica \d+", place)
            if ran_on and sample in numbers:
                members[ran_on.group()].add(sample)
    return next((name for name in sorted(members) if members[name] == some), "")
