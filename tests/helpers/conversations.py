"""Lengths of samples with earlier answers in their inputs, drawn by Hypothesis."""

import numpy as np
from hypothesis import strategies as st

from megatron_dynapipe.sampling import SpanTable

Sample = tuple[int, int, list[tuple[int, int]]]
"""Tokens of an input and of a target, and the learned parts of the input."""


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    inputs = draw(st.integers(1, 40))
    places = sorted(draw(st.lists(st.integers(0, inputs), max_size=8, unique=True)))
    spans = [(places[at], places[at + 1]) for at in range(0, len(places) - 1, draw(st.integers(1, 2)))]
    return inputs, draw(st.integers(1, 40)), spans


def span_table(rows: list[Sample]) -> SpanTable:
    spans = [(at, *span) for at, row in enumerate(rows) for span in row[2]]
    return SpanTable(np.array(spans, np.int64).reshape(-1, 3))
