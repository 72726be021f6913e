"""Plain text as samples: pieces, and spans that sentinels stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.prepare.encode import pieces, spans_removed

SENTINELS = tuple(range(1000, 1100))


@given(count=st.integers(1, 60), length=st.integers(2, 20))
def test_pieces_are_the_text(count: int, length: int) -> None:
    tokens = list(range(count))
    found = list(pieces(tokens, length))
    assert [token for piece in found for token in piece] == tokens
    assert all(2 <= len(piece) <= length + 1 for piece in found) or count == 1


@given(count=st.integers(2, 600), seed=st.integers(0, 2**64 - 1))
def test_spans_put_back_give_the_text(count: int, seed: int) -> None:
    tokens = list(range(count))
    given_ids, wanted = spans_removed(tokens, SENTINELS, seed)
    assert spans_removed(tokens, SENTINELS, seed) == (given_ids, wanted)
    removed: dict[int, list[int]] = {}
    for token in wanted:
        if token >= 1000:
            current = removed.setdefault(token, [])
        else:
            current.append(token)
    back = [each for token in given_ids for each in (removed[token] if token >= 1000 else [token])]
    assert back == tokens
    assert list(removed) == list(SENTINELS[: len(removed)])
    assert len(wanted) - len(removed) == min(max(round(0.15 * count), 1), count - 1)


def test_too_few_sentinels() -> None:
    with pytest.raises(DataError, match=r"expected a tokenizer with 26 sentinels .* for 512 tokens, it has 0"):
        spans_removed(range(512), (), 0)
