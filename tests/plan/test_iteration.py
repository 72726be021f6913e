import msgspec
import pytest

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.iteration import MicroBatch, StageEntry, Totals
from megatron_dynapipe.units import BatchLayout, Recompute, Shape
from tests.helpers.plans import make_plan


def micro_batch(**changes):
    fields = {
        "sample_ids": (4, 9),
        "input_lengths": (10, 16),
        "target_lengths": (3, 6),
        "shape": Shape(2, 16, 8),
        "recompute": Recompute.NONE,
        "stored_bytes": (5, 5),
        "peak_bytes": (7, 7),
    }
    return MicroBatch(**(fields | changes))


def test_a_micro_batch_has_as_many_samples_as_its_shape():
    micro_batch()
    for changes in ({"sample_ids": (4,)}, {"input_lengths": (1, 2, 3)}, {"shape": Shape(3, 16, 8)}):
        with pytest.raises(PlanError, match=r"expected \d samples with their lengths in a padded micro-batch of shape"):
            micro_batch(**changes)
    with pytest.raises(PlanError, match="expected 1 samples with their lengths in a padded"):
        micro_batch(sample_ids=(), input_lengths=(), target_lengths=(), shape=Shape(0, 16, 8))


def test_a_packed_micro_batch_has_one_row_of_any_samples():
    packed = {"layout": BatchLayout.PACKED, "shape": Shape(1, 32, 16)}
    micro_batch(**packed)
    with pytest.raises(PlanError, match=r"expected a packed micro-batch of 1 row, got shape 2x16\+8 with 2 rows"):
        micro_batch(**packed | {"shape": Shape(2, 16, 8)})
    with pytest.raises(PlanError, match=r"expected 2 samples .* in a packed micro-batch .* 2 sample ids, 1 input"):
        micro_batch(**packed | {"input_lengths": (10,)})


def test_a_micro_batch_has_bytes_for_the_same_stages():
    with pytest.raises(PlanError, match="expected stored and peak bytes for the same virtual stages, got 2 and 1"):
        micro_batch(peak_bytes=(7,))


def test_totals_count_all_replicas():
    plan = make_plan((2, 0, 1), 2)
    assert plan.totals == Totals(
        samples=6,
        real_tokens=(10 + 16) + (10 + 24) + (10 + 16),
        padded_positions=2 * 16 + 2 * 24 + 2 * 16,
        micro_batches=(2, 0, 1),
        predicted_ns=max(replica.predicted_ns for replica in plan.replicas),
    )


def test_totals_count_the_samples_of_packed_rows():
    plan = make_plan((2,), 2, layouts=(BatchLayout.PACKED, BatchLayout.PADDED))
    assert (plan.totals.samples, plan.totals.padded_positions) == (4, 1 * 24 + 2 * 24)


def test_a_ranks_share_is_cut_out_of_the_plan():
    plan = make_plan((2, 1), 2)
    entry = StageEntry.of(plan, 1, 0, plan_digest="d1")
    assert (entry.replica, entry.iteration, entry.plan_digest) == (1, 7, "d1")
    assert entry.micro_batches == plan.replicas[1].micro_batches
    assert entry.stage_plan == plan.replicas[1].stages[0]
    assert entry.totals.micro_batches == (2, 1)


def test_plans_are_frozen():
    with pytest.raises(AttributeError):
        make_plan().iteration = 8
    assert msgspec.structs.replace(make_plan(), iteration=8).iteration == 8
