"""What is kept of long samples, against a slow implementation by lists of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling import Cutter, SpanTable, TruncationSide
from tests.helpers.conversations import Sample, samples, span_table


def slowly(sample: Sample, side: str, room: int) -> list[int]:
    """The places of an input that stay where there is room for so many tokens."""
    inputs, _, spans = sample
    places = list(range(inputs))
    if inputs <= room:
        return places
    if side == "right":
        return places[:room]
    if side == "middle":
        return places[: room - room // 2] + places[inputs - room // 2 :]
    turns = [end for _, end in spans if inputs - end <= room and end < inputs]
    return places[turns[0] if turns else inputs - room :]


@given(st.lists(samples(), min_size=1, max_size=6), st.sampled_from(TruncationSide), st.integers(2, 60), st.data())
def test_inputs_are_cut_before_targets(rows, side, most, data):
    family = data.draw(st.sampled_from(ModelFamily))
    limits = (most, data.draw(st.integers(1, 40)))
    spans = span_table(rows)
    cutter = Cutter(family, (side,), spans)
    ids, inputs, targets = np.arange(len(rows)), *(np.array(of, np.int32) for of in list(zip(*rows, strict=True))[:2])
    cut = cutter.cut(ids, inputs, targets, limits)
    learned, labels = cutter.learned(ids, inputs, cut), cutter.labels(ids, inputs, cut)
    lengths = list(zip(*cutter.lengths(cut), strict=True))
    for sample, (row, head, tail, target) in enumerate(zip(rows, *cut, strict=True)):
        is_gpt = family is ModelFamily.GPT
        kept_target = min(row[1], most - 1 if is_gpt else limits[1])
        assert target == kept_target >= 1
        places = [*range(head), *range(row[0] - tail, row[0])]
        assert places == slowly(row, side, most - kept_target if is_gpt else most)
        assert len(places) >= 1 and len(places) + (target if is_gpt else 0) <= most
        answers = [place for place in places if any(first <= place < end for first, end in row[2])]
        assert learned[sample] == target + (len(answers) if is_gpt else 0)
        if is_gpt:
            assert labels[sample] == target + len([place for place in answers if place != places[0]])
        # A plan says no more than the lengths: cut to them again, a sample stays as it is.
        assert cutter.planned(sample, row[0], row[1], lengths[sample]) == (head, tail, target)
    assert cutter.learned_in_all(targets) == targets.sum() + (spans.tokens if family is ModelFamily.GPT else 0)


def test_sides_by_task():
    cutter = Cutter(ModelFamily.GPT, tuple(TruncationSide), task_ids=np.array([2, 0, 1, 0], np.int16))
    ids = np.array([3, 2, 0])
    cut = cutter.cut(ids, np.full(3, 9), np.full(3, 2), (6, 0))
    assert (cut.head.tolist(), cut.tail.tolist()) == ([4, 0, 2], [0, 4, 2])
    with pytest.raises(DataError, match="expected the samples' tasks for 3 sides, got none"):
        Cutter(ModelFamily.GPT, tuple(TruncationSide)).cut(ids, np.full(3, 9), np.full(3, 2), (6, 0))


def test_a_conversation_begins_after_an_answer():
    """The earliest turns go; an answer at the very end of the input leaves none of it, and does not count as a turn."""
    cutter = Cutter(ModelFamily.GPT, (TruncationSide.LEFT,), SpanTable(np.array([[0, 2, 5], [0, 8, 10], [1, 8, 10]])))
    cut = cutter.cut(np.array([0, 0, 0, 1]), np.array([12, 12, 12, 10]), np.full(4, 4), (np.array([12, 11, 5, 9]), 0))
    assert cut.tail.tolist() == [7, 7, 1, 5] and not cut.head.any()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[2, 0, 1]], "expected learned parts of 2 samples, got one of sample 2"),
        ([[0, 0, 3], [1, 1, 5]], "within the 4 tokens of sample 1's input, got 1 to 5"),
    ],
)
def test_spans_outside_their_inputs(rows, message):
    with pytest.raises(DataError, match=message):
        SpanTable(np.array(rows)).check(np.array([3, 4]))
