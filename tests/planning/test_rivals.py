"""Rows by the rules of other trainers: small cases worked out by hand from their sources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.rivals import RIVALS, Room, differencing

Rows = list[list[int]]


def rows(name: str, lengths: list[int], replicas: int = 1, group: int = 1, positions: int = 10) -> Rows:
    return RIVALS[name](lengths, Room(positions=positions, replicas=replicas, group=group, hidden_size=4))


@pytest.mark.parametrize(
    ("name", "lengths", "replicas", "group", "expected"),
    [
        pytest.param("dp_balanced", [5, 5, 4, 6], 1, 1, [[0, 1], [2, 3]], id="dp_balanced, as they arrive"),
        pytest.param("dp_balanced", [5, 6, 4], 1, 1, [[0], [1, 2]], id="dp_balanced, a new row"),
        pytest.param("dp_balanced", [2, 2, 2], 2, 1, [[0, 1], [2]], id="dp_balanced, the last sample moves"),
        pytest.param("dp_balanced", [3, 3, 3, 1, 9], 2, 2, [[0, 1], [4], [3], [2]], id="dp_balanced, virtual stages"),
        # Over two replicas {6, 1} and {4, 3}; each as one micro-batch.
        pytest.param("verl", [6, 4, 3, 1], 2, 1, [[0, 3], [1, 2]], id="verl, replicas"),
        # 28 tokens are three micro-batches: {9}, {8, 1}, {7, 3}; the largest (7 + 3) in the middle.
        pytest.param("verl", [9, 8, 7, 3, 1], 1, 1, [[1, 4], [2, 3], [0]], id="verl, light ones at both ends"),
        pytest.param("slime", [9, 8, 7, 3, 1], 1, 1, [[0], [1, 4], [2, 3]], id="slime"),
        # One of 10 positions becomes two for two replicas: 4 | 3, then 2 and 1 to the lesser: {4, 1}, {3, 2}.
        pytest.param("slime", [4, 3, 2, 1], 2, 1, [[0, 3], [1, 2]], id="slime, split in two"),
    ],
)
def test_rows_by_hand(name: str, lengths: list[int], replicas: int, group: int, expected: Rows) -> None:
    found = rows(name, lengths, replicas, group)
    assert sorted(found) == sorted(expected) if name == "slime" else found == expected


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("dp_balanced", [9, 9, 9], "cannot make a multiple of 2 rows of 3 samples"),
        ("slime", [9, 9, 9], "cannot make a multiple of 2 micro-batches of 3 samples"),
    ],
)
def test_what_a_rule_does_not_serve_is_refused(name: str, lengths: list[int], message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        rows(name, lengths, replicas=2)


def test_differencing() -> None:
    """8 - 7, 6 - 5 and 4 leave 1, 1 and 4, then 3 and 1, then 2: Karmarkar and Karp's own example."""
    work = [8, 7, 6, 5, 4]
    assert sorted(sum(work[i] for i in part) for part in differencing(work, 2)) == [14, 16]
    assert sorted(differencing([1, 2, 3, 10], 2, equal_counts=True)) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(1, 10), min_size=8, max_size=40), st.integers(1, 4), st.sampled_from(sorted(RIVALS)))
def test_every_sample_is_in_one_row(lengths: list[int], replicas: int, name: str) -> None:
    found = rows(name, lengths, replicas, positions=20)
    assert sorted(sample for row in found for sample in row) == list(range(len(lengths)))
    assert all(found) and (len(found) % replicas == 0)
    if name == "dp_balanced":  # The others balance work, and may exceed a row.
        assert all(sum(lengths[i] for i in row) <= 20 for row in found)
