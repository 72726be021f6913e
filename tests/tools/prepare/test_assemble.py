"""Which split is whose: by digests alone."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.data.meta import SPLITS
from megatron_dynapipe.tools.prepare.assemble import assign_splits


@settings(deadline=None)
@given(
    digests=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60, unique=True),
    valid=st.floats(0, 0.4),
    test=st.floats(0, 0.4),
    order=st.randoms(),
)
def test_splits_do_not_depend_on_order(digests: list[int], valid: float, test: float, order: object) -> None:
    count = len(digests)
    splits = assign_splits(np.array(digests, np.uint64), valid, test)
    counts = Counter(SPLITS[split] for split in splits)
    assert counts["train"] >= 1
    if count >= 10:
        assert counts["valid"] == max(round(valid * count), valid > 0)
        assert counts["test"] == max(round(test * count), test > 0)
    by_digest = dict(zip(digests, splits, strict=True))
    order.shuffle(digests)  # type: ignore[attr-defined]
    assert dict(zip(digests, assign_splits(np.array(digests, np.uint64), valid, test), strict=True)) == by_digest


def test_equal_digests_go_in_their_order() -> None:
    splits = assign_splits(np.array([5, 1, 1, 1, 9], np.uint64), 0.2, 0.2)
    assert [SPLITS[split] for split in splits] == ["train", "test", "valid", "train", "train"]
