import pytest
from msgspec.structs import replace

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.plan import Piece, Totals
from megatron_dynapipe.core.units import BatchLayout, Shape
from tests.helpers.lists import micro_batch
from tests.helpers.plans import make_plan

GOOD = micro_batch(Shape(2, 16, 8), (10, 16), (3, 6), stored_bytes=(5, 5), peak_bytes=(7, 7))
PACKED = {"layout": BatchLayout.PACKED, "shape": Shape(1, 32, 16)}
NONE = {"sample_ids": (), "input_lengths": (), "target_lengths": (), "shape": Shape(0, 16, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_ids": (4,)}, r"expected 2 samples with their lengths in a padded micro-batch of shape"),
        ({"input_lengths": (1, 2, 3)}, r"expected 2 samples with their lengths in a padded micro-batch of shape"),
        ({"shape": Shape(3, 16, 8)}, r"expected 3 samples with their lengths in a padded micro-batch of shape"),
        (NONE, "expected 1 samples with their lengths in a padded"),
        (PACKED | {"shape": Shape(2, 16, 8)}, r"a packed micro-batch of 1 row, got shape 2x16\+8 with 2 rows"),
        (PACKED | {"input_lengths": (10,)}, r"expected 2 samples .* in a packed micro-batch .* 2 sample ids, 1 input"),
        ({"pieces": (Piece(0, 8), Piece(0, 8))}, "expected pieces in a packed micro-batch alone"),
        ({"labels": (1,)}, "expected labels of each of 2 samples or of none, got 1"),
        ({"peak_bytes": (7,)}, "stored and peak bytes for the same virtual stages, got 2, 2 and 1"),
    ],
)
def test_micro_batches_that_cannot_be_are_refused(changes, message):
    assert replace(GOOD, **PACKED).layout is BatchLayout.PACKED
    with pytest.raises(PlanError, match=message):
        replace(GOOD, **changes)


def test_totals_count_all_replicas():
    plan = make_plan((2, 0, 1), 2)
    assert plan.totals == Totals(
        samples=6,
        real_tokens=(10 + 16) + (10 + 24) + (10 + 16),
        padded_positions=2 * 16 + 2 * 24 + 2 * 16,
        micro_batches=(2, 0, 1),
        predicted_ns=max(replica.predicted_ns for replica in plan.replicas),
    )
    rows = make_plan((2,), 2, layouts=(BatchLayout.PACKED, BatchLayout.PADDED)).totals
    assert (rows.samples, rows.padded_positions) == (4, 1 * 24 + 2 * 24)
