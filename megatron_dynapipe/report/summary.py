"""The summary at a run's end: padding, micro-batches, speed, how good the predictions were, waits for plans."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import NS_PER_MS, Shape, in_mb
from megatron_dynapipe.report.records import IterationRecord, MemoryRecord, StageRecord

SCALING_ITERATIONS = 5
"""Measured iterations after warm-up that the prediction is scaled by."""
PREFETCHED_ITERATION = 2
"""From this iteration of a start on, plans are expected to be there when they are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The spread of a number over a run."""

    minimum: int
    median: float
    maximum: int

    @classmethod
    def of(cls, values: Iterable[int]) -> "Spread":
        """The spread of at least one value."""
        numbers = sorted(values)
        return cls(minimum=numbers[0], median=median(numbers), maximum=numbers[-1])

    def __str__(self) -> str:
        return f"{self.minimum} / {self.median:g} / {self.maximum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers. Efficiencies, errors and shares are fractions of 1."""

    iterations: int
    padding_efficiency: float
    """Real tokens per padded position."""
    maximum_padding_efficiency: float
    """The same if every sample were padded to the maximum lengths."""
    micro_batches: Spread
    """Per iteration, over all replicas."""
    packed_share: float
    """The share of the micro-batches that are packed rows."""
    sizes: Spread
    input_lengths: Spread
    target_lengths: Spread
    tokens_per_second: float
    """Real tokens, over all but the warm-up iteration where there are others."""
    mfu: float | None
    """Share of the devices' peak, over the time that tokens per second count; None if it is not known."""
    measured_ms: float
    """Median per iteration."""
    predicted_ms: float
    """Median per iteration."""
    prediction_scale: float | None
    """The factor of predictions by computed costs, measured over predicted time in the first measured iterations; None
    of measured costs, whose predictions are as the plans had them."""
    prediction_error: float | None
    """Median of |prediction - measured| / measured; None without iterations to judge."""
    plan_wait_share: float
    """Time waited for plans, of all time, from the iteration `PREFETCHED_ITERATION` on."""
    pictures: tuple[Path, ...]
    memory: MemoryRecord | None = None
    """The memory of the rank with the most fragments; None without GPUs."""
    outside: Mapping[str, float] = field(default_factory=dict)
    """Shares of an iteration that lie between two lists: "reductions" that passes have not hidden, the "optimizer", and
    "the rest", which is the host's and Megatron's; empty if they were not measured."""


def summarise(
    records: Sequence[IterationRecord],
    *,
    maximum: Shape,
    computed_costs: bool = False,
    starts: Collection[int] = (),
    pictures: Sequence[Path] = (),
    memory: Sequence[MemoryRecord] = (),
    stages: Sequence[StageRecord] = (),
) -> Summary:
    """Sum up a run.

    Args:
        records: all iterations'; if several replicas recorded one, the slowest counts and shapes are joined.
        maximum: lengths that a run without planning would pad every sample to; its size is not looked at.
        computed_costs: whether the run began with computed costs: plans of them are scaled to this machine's time.
        starts: first iterations of the run's starts, which pay for starting up and count in no error and no rate.
        pictures: files to name.
        memory: all ranks'.
        stages: all ranks'.

    Raises:
        DataError: there are no records.
    """
    if not records:
        raise DataError("expected at least one iteration to sum up, got none")
    runs = joined(records)
    begins = {runs[0].iteration, *starts}
    warm = [run for run in runs if run.iteration not in begins]
    timed = warm or runs
    scale = _scale(timed) if computed_costs else None
    predicted = {run.iteration: run.predicted_ns * (1.0 if scale is None else scale) for run in runs}
    rest = warm if scale is None else warm[SCALING_ITERATIONS:]  # none that the scale is of
    judged = [run for run in rest if run.predicted_ns > 0 and run.measured_ns > 0]
    tokens = sum(run.totals.real_tokens for run in runs)
    shapes = [shape for run in runs for shape in run.shapes]
    if not shapes:
        raise DataError("expected at least one micro-batch to sum up, got none")
    return Summary(
        iterations=len(runs),
        padding_efficiency=min(tokens / sum(run.totals.padded_positions for run in runs), 1.0),
        maximum_padding_efficiency=tokens / (sum(run.totals.samples for run in runs) * _positions(maximum)),
        micro_batches=Spread.of(sum(run.totals.micro_batches) for run in runs),
        packed_share=sum(run.packed for run in runs) / len(shapes),
        sizes=Spread.of(shape.size for shape in shapes),
        input_lengths=Spread.of(shape.input_length for shape in shapes),
        target_lengths=Spread.of(shape.target_length for shape in shapes),
        tokens_per_second=sum(r.totals.real_tokens for r in timed) / (sum(map(whole_ns, timed)) / 1e9),
        mfu=sum(r.at_peak_ns for r in timed) / sum(map(whole_ns, timed)) or None,
        measured_ms=median(run.measured_ns for run in runs) / NS_PER_MS,
        predicted_ms=median(predicted.values()) / NS_PER_MS,
        prediction_scale=scale,
        prediction_error=_error(judged, predicted),
        plan_wait_share=_wait_share(warm, begins, runs),
        pictures=tuple(pictures),
        memory=max(memory, key=lambda record: record.fragment_bytes, default=None),
        outside=_outside(stages),
    )


def format_summary(summary: Summary) -> str:
    """The summary as lines for the log."""
    lines = [
        f"{summary.iterations} iterations, {summary.tokens_per_second:,.0f} tokens per second"
        + (f", MFU {summary.mfu:.1%}" if summary.mfu else ""),
        f"padding efficiency {summary.padding_efficiency:.1%} "
        f"({summary.maximum_padding_efficiency:.1%} with every sample padded to the maximum)",
        f"micro-batches per iteration {summary.micro_batches} (min / median / max)"
        + (f", {summary.packed_share:.0%} of them packed rows" if summary.packed_share else ""),
        f"shapes: {_span(summary.sizes)} row{'s' * (summary.sizes.maximum > 1)},"
        f" {_span(summary.input_lengths)} input positions"
        + (f", {_span(summary.target_lengths)} target positions" if summary.target_lengths.maximum else ""),
        f"time per iteration, over all stages, {summary.measured_ms:,.1f} ms measured,"
        f" {summary.predicted_ms:,.1f} ms predicted" + _prediction_text(summary),
        f"waiting for plans {summary.plan_wait_share:.2%} of the time after iteration {PREFETCHED_ITERATION}",
    ]
    if summary.outside:
        causes = ", ".join(f"{name} {share:.1%}" for name, share in summary.outside.items())
        lines.append(f"outside of passes {sum(summary.outside.values()):.1%} of an iteration: {causes}")
    if summary.memory is not None:
        lines.append(_memory_line(summary.memory))
    for path in summary.pictures:
        is_trace = path.suffix == ".json"
        lines.append(f"trace: {path} (https://ui.perfetto.dev opens it)" if is_trace else f"picture: {path}")
    return "\n".join(lines)


def _prediction_text(summary: Summary) -> str:
    scale = summary.prediction_scale
    error = summary.prediction_error
    scaled = "" if scale is None else f" by computed costs, scaled by {scale:.3g} from the first iterations"
    return scaled if error is None else f"{scaled} (median error {error:.1%})"


def _memory_line(memory: MemoryRecord) -> str:
    reserved, tensors, fragments = in_mb(memory.reserved_bytes, memory.allocated_bytes, memory.fragment_bytes)
    retries = f", having given its cache back {memory.retries} times" if memory.retries else ""
    return (
        f"memory: rank {memory.rank}'s allocator held up to {reserved} for tensors of up to {tensors}{retries}: "
        f"a --dynapipe-device-memory-limit {fragments} below the device's memory has room for its fragments"
    )


def joined(records: Sequence[IterationRecord]) -> list[IterationRecord]:
    """One record per iteration, in order: the slowest replica's times, all replicas' shapes."""
    by_iteration: dict[int, list[IterationRecord]] = defaultdict(list)
    for record in records:
        by_iteration[record.iteration].append(record)
    return [
        IterationRecord(
            iteration=iteration,
            measured_ns=max(r.measured_ns for r in group),
            predicted_ns=max(r.predicted_ns for r in group),
            plan_wait_ns=max(r.plan_wait_ns for r in group),
            totals=group[0].totals,
            shapes=tuple(shape for r in group for shape in r.shapes),
            packed=sum(r.packed for r in group),
            at_peak_ns=max(r.at_peak_ns for r in group),
            corrections=group[0].corrections,
        )
        for iteration, group in sorted(by_iteration.items())
    ]


def _outside(records: Sequence[StageRecord]) -> dict[str, float]:
    """Means over stages and replicas of medians over iterations, without those that no other iteration precedes."""
    of_stage: dict[tuple[int, int], list[StageRecord]] = defaultdict(list)
    for record in records:
        if record.between_ns:
            of_stage[record.replica, record.stage].append(record)
    parts: dict[str, float] = defaultdict(float)
    for timed in of_stage.values():
        whole = median(_list_ns(record) + record.plan_wait_ns + record.between_ns for record in timed)
        reduction, optimizer, between = (
            median(getattr(record, name) for record in timed) / whole / len(of_stage)
            for name in ("reduction_ns", "optimizer_ns", "between_ns")
        )
        parts["reductions"] += reduction
        parts["optimizer"] += optimizer
        parts["the rest"] += max(between - reduction - optimizer, 0.0)
    return dict(parts)


def _list_ns(record: StageRecord) -> int:
    return record.forward_ns + record.backward_ns + record.transfer_ns + record.other_ns


def _scale(runs: Sequence[IterationRecord]) -> float | None:
    """Measured over predicted time in the first measured iterations that computed costs planned."""
    first = [run for run in runs if run.predicted_ns > 0]
    return median(r.measured_ns / r.predicted_ns for r in first[:SCALING_ITERATIONS]) if first else None


def _wait_share(warm: Sequence[IterationRecord], begins: Collection[int], runs: Sequence[IterationRecord]) -> float:
    late = [run for run in warm if not any(0 < run.iteration - begin < PREFETCHED_ITERATION for begin in begins)]
    counted = late or runs
    return sum(run.plan_wait_ns for run in counted) / sum(map(whole_ns, counted))


def _error(runs: Sequence[IterationRecord], predicted: Mapping[int, float]) -> float | None:
    errors = [abs(predicted[run.iteration] - run.measured_ns) / run.measured_ns for run in runs]
    return median(errors) if errors else None


def whole_ns(run: IterationRecord) -> int:
    """Time of an iteration's list and of its wait for the plan."""
    return run.measured_ns + run.plan_wait_ns


def _positions(shape: Shape) -> int:
    return shape.input_length + shape.target_length


def _span(spread: Spread) -> str:
    return str(spread.minimum) if spread.minimum == spread.maximum else f"{spread.minimum}–{spread.maximum}"
