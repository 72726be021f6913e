from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.plan import Totals
from megatron_dynapipe.core.units import NS_PER_MS, Shape
from megatron_dynapipe.report.records import IterationRecord, MemoryRecord, StageRecord
from megatron_dynapipe.report.summary import format_summary, summarise

MAXIMUM = Shape(1, 90, 10)


ONE_SHAPE = (Shape(4, 16, 8),)


def record(iteration, *, measured_ms=20.0, predicted_ms=10.0, wait_ms=0.0, batches=(2, 1), shapes=ONE_SHAPE):
    return IterationRecord(
        iteration=iteration,
        measured_ns=round(measured_ms * NS_PER_MS),
        predicted_ns=round(predicted_ms * NS_PER_MS),
        plan_wait_ns=round(wait_ms * NS_PER_MS),
        totals=Totals(samples=4, real_tokens=60, padded_positions=80, micro_batches=batches, predicted_ns=0),
        shapes=shapes,
    )


def test_micro_batches_and_shapes_are_held_against_the_maximum():
    records = [
        record(0, batches=(2, 1)),
        record(1, batches=(5, 4), shapes=(Shape(1, 64, 8), Shape(9, 8, 16))),
        record(2, batches=(2, 2)),
    ]
    summary = summarise(records, maximum=MAXIMUM)
    assert (summary.padding_efficiency, summary.maximum_padding_efficiency) == (0.75, 60 / (4 * 100))
    assert str(summary.micro_batches) == "3 / 4 / 9"
    assert (summary.sizes.minimum, summary.sizes.maximum) == (1, 9)
    assert (summary.input_lengths.minimum, summary.input_lengths.maximum) == (8, 64)
    assert (summary.target_lengths.minimum, summary.target_lengths.maximum) == (8, 16)


def stage_record(iteration, *, stage=0, between_ms=10.0, reduction_ms=2.0, optimizer_ms=5.0):
    spent = {"forward": 30.0, "backward": 50.0, "transfer": 5.0, "other": 3.0, "plan_wait": 2.0}
    spent |= {"between": between_ms, "reduction": reduction_ms, "optimizer": optimizer_ms}
    times = {f"{name}_ns": round(ms * NS_PER_MS) for name, ms in spent.items()}
    return StageRecord(iteration=iteration, replica=0, stage=stage, planned_activation_bytes=0, **times)


def test_what_lies_outside_of_passes_is_named():
    first = stage_record(0, between_ms=0.0, reduction_ms=0.0, optimizer_ms=0.0)  # none precedes it
    saved = stage_record(3, between_ms=5000.0)  # a checkpoint was saved before it
    stages = [first, *(stage_record(i) for i in (1, 2)), saved]
    summary = summarise([record(0)], maximum=MAXIMUM, stages=stages)
    assert summary.outside == pytest.approx({"reductions": 0.02, "optimizer": 0.05, "the rest": 0.03})
    said = format_summary(summary)
    assert "outside of passes 10.0% of an iteration: reductions 2.0%, optimizer 5.0%, the rest 3.0%" in said
    both = [*stages, *(stage_record(i, stage=1, between_ms=110.0) for i in (1, 2))]
    assert summarise([record(0)], maximum=MAXIMUM, stages=both).outside["reductions"] == pytest.approx(0.015)
    assert "outside" not in format_summary(summarise([record(0)], maximum=MAXIMUM, stages=[first]))


def test_of_replicas_the_slowest_counts_and_some_may_have_no_micro_batches():
    both = [record(0, measured_ms=20), record(0, measured_ms=30, shapes=(Shape(7, 8, 8),)), record(0, shapes=())]
    summary = summarise(both, maximum=MAXIMUM)
    assert (summary.iterations, summary.measured_ms, summary.sizes.minimum, summary.sizes.maximum) == (1, 30, 4, 7)
    with pytest.raises(DataError, match="expected at least one iteration"):
        summarise([], maximum=MAXIMUM)
    with pytest.raises(DataError, match="expected at least one micro-batch to sum up, got none"):
        summarise([record(0, shapes=())], maximum=MAXIMUM)


def test_predictions_of_computed_costs_are_scaled_by_the_first_measured_iterations_and_judged_by_the_rest():
    slow_start = record(0, measured_ms=500)
    scaling = [record(i, measured_ms=20) for i in range(1, 6)]
    later = [record(6, measured_ms=22), record(7, measured_ms=20), record(8, measured_ms=25)]
    summary = summarise([slow_start, *scaling, *later], maximum=MAXIMUM, computed_costs=True)
    assert summary.prediction_scale == 2
    assert summary.predicted_ms == 20
    assert summary.prediction_error == pytest.approx(2 / 22)
    assert summarise([slow_start, *scaling], maximum=MAXIMUM, computed_costs=True).prediction_error is None


def test_predictions_of_measured_costs_are_reported_as_logged_the_last_half_too():
    wrong_at_first = [record(i, measured_ms=20, predicted_ms=10) for i in range(5)]
    corrected = [record(i, measured_ms=20, predicted_ms=19) for i in range(5, 9)]
    summary = summarise([*wrong_at_first, *corrected], maximum=MAXIMUM)
    assert summary.prediction_scale is None and summary.predicted_ms == 10
    assert summary.prediction_error == pytest.approx((0.5 + 0.05) / 2)
    assert summarise([record(0)], maximum=MAXIMUM).prediction_error is None


def test_the_first_iterations_of_a_later_start_count_in_no_rate():
    times = {4: {"measured_ms": 900, "wait_ms": 900}, 5: {"wait_ms": 70}}
    records = [record(i, **{"measured_ms": 20, "predicted_ms": 20} | times.get(i, {})) for i in range(8)]
    summary = summarise(records, maximum=MAXIMUM, starts=[0, 4])
    assert (summary.plan_wait_share, summary.prediction_error) == (0, 0)
    assert summary.tokens_per_second == pytest.approx(6 * 60 / 0.190)
    early = [record(0, wait_ms=900, measured_ms=1e6), record(1, wait_ms=50), record(2, wait_ms=5)]
    summary = summarise(early, maximum=MAXIMUM)
    assert summary.plan_wait_share == 5 / 25 and summary.tokens_per_second == pytest.approx(2 * 60 / 0.095)


PICTURES = [Path("out/timeline.png"), Path("out/timeline.trace.json")]


def test_text():
    packed = msgspec.structs.replace(record(1), packed=1)
    records = [record(0), packed, *(record(i) for i in range(2, 8))]
    summary = summarise(records, maximum=MAXIMUM, computed_costs=True, pictures=PICTURES)
    assert format_summary(summary) == (
        "8 iterations, 3,000 tokens per second\n"
        "padding efficiency 75.0% (15.0% with every sample padded to the maximum)\n"
        "micro-batches per iteration 3 / 3 / 3 (min / median / max), 12% of them packed rows\n"
        "shapes: 4 rows, 16 input positions, 8 target positions\n"
        "time per iteration, over all stages, 20.0 ms measured, 20.0 ms predicted by computed costs,"
        " scaled by 2 from the first iterations (median error 0.0%)\n"
        "waiting for plans 0.00% of the time after iteration 2\n"
        "picture: out/timeline.png\n"
        "trace: out/timeline.trace.json (https://ui.perfetto.dev opens it)"
    )
    text = format_summary(summarise(records, maximum=MAXIMUM))
    assert "20.0 ms measured, 10.0 ms predicted (median error 50.0%)" in text
    of_a_row = [msgspec.structs.replace(run, shapes=(Shape(1, 16), Shape(1, 24))) for run in records]
    assert "shapes: 1 row, 16–24 input positions\n" in format_summary(summarise(of_a_row, maximum=MAXIMUM))


def test_the_rank_with_the_most_fragments_says_what_to_leave_free():
    megabyte = 10**6
    memory = [
        MemoryRecord(rank=0, allocated_bytes=900 * megabyte, reserved_bytes=1000 * megabyte, retries=0),
        MemoryRecord(rank=1, allocated_bytes=500 * megabyte, reserved_bytes=800 * megabyte, retries=2),
    ]
    text = format_summary(summarise([record(0)], maximum=MAXIMUM, memory=memory))
    said = next(line for line in text.splitlines() if line.startswith("memory: "))
    assert said.startswith("memory: rank 1's allocator held up to 800 MB for tensors of up to 500 MB, having given")
    assert "cache back 2 times: a --dynapipe-device-memory-limit 300 MB below the device's memory" in said
    assert "memory: " not in format_summary(summarise([record(0)], maximum=MAXIMUM))


def test_the_use_of_the_peak_leaves_out_starts_and_is_not_known_everywhere():
    """Half of the time at the peak would have done, of which a tenth waited for the plan."""
    warm = [msgspec.structs.replace(record(n, measured_ms=18, wait_ms=2), at_peak_ns=10 * NS_PER_MS) for n in (1, 2)]
    summary = summarise([record(0, measured_ms=500), *warm, *warm], maximum=MAXIMUM)
    assert summary.mfu == 0.5 and "tokens per second, MFU 50.0%" in format_summary(summary)
    unknown = summarise([record(0), record(1)], maximum=MAXIMUM)
    assert unknown.mfu is None and "MFU" not in format_summary(unknown)
