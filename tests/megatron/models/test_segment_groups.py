"""Segments of a packed row in groups of like lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.megatron.models.segment_groups import CALL_SCORES, group_segments, like_segments


@pytest.mark.parametrize(
    ("queries", "keys", "groups"),
    [
        ([8, 8, 8], [8, 8, 8], [[0, 1, 2]]),
        ([8, 6, 7], [8, 6, 7], [[0, 2, 1]]),
        ([512, 8, 16], [512, 8, 16], [[0], [2, 1]]),  # a short one would be padded to 512 × 512
        ([3, 0, 4], [5, 9, 0], [[2], [0]]),  # nobody asks the second; the third has nobody to ask
        ([0], [0], []),
    ],
)
def test_like_segments(queries, keys, groups):
    assert like_segments(queries, keys) == groups


lengths = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300)), min_size=1, max_size=30)


@given(lengths)
def test_every_query_comes_back_to_its_place_and_padding_is_bounded(pairs):
    queries, keys = zip(*pairs, strict=True)
    groups, back = group_segments(queries, keys, torch.device("cpu"))
    places = torch.cat([group.query_places for group in groups]) if groups else torch.zeros(0).long()
    assert places[back].tolist() == list(range(sum(queries)))
    for group, segments in zip(groups, like_segments(queries, keys), strict=True):
        real = sum(queries[s] * keys[s] for s in segments)
        assert group.count * group.queries * group.keys - real <= CALL_SCORES
        if group.keys:
            looked_at = (
                torch.ones(group.count, group.keys, dtype=torch.bool)
                if group.real_keys is None
                else (group.real_keys[:, 0, 0])
            )
            wanted = [p for s in segments for p in range(sum(keys[:s]), sum(keys[: s + 1]))]
            assert group.key_places.view(group.count, -1)[looked_at].tolist() == wanted
