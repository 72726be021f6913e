"""Samples in pieces: tiles, chains, and what verification says of others."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Instruction
from megatron_dynapipe.core.plan import MicroBatch, Piece, row_offsets
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape, round_up
from megatron_dynapipe.ways.chains import chains, check_chain_order, check_pieces, cut_entries
from tests.helpers.lists import micro_batch, parse_instruction

GPT, T5 = ModelFamily.GPT, ModelFamily.T5


@dataclass(frozen=True)
class Entry:
    sample: int
    tokens: int
    start: int
    end: int


def row(*entries: Entry) -> MicroBatch:
    shape = Shape(1, round_up(sum(entry.end - entry.start for entry in entries)))
    pieces = tuple(Piece(entry.start, entry.end) for entry in entries)
    samples = tuple(entry.sample for entry in entries)
    tokens = [entry.tokens for entry in entries]
    return micro_batch(shape, tokens, sample_ids=samples, layout=BatchLayout.PACKED, pieces=pieces)


def cut(start: int, end: int, *, sample: int = 7, tokens: int = 21) -> Entry:
    return Entry(sample, tokens, start, end)


WHOLE = Entry(3, 6, 0, 5)
ROWS = [row(cut(0, 8)), row(cut(8, 16), WHOLE), row(cut(16, 20))]


def test_what_a_row_with_pieces_holds() -> None:
    assert [*cut_entries(ROWS[1])] == [(0, Piece(8, 16))]
    assert row_offsets(GPT, ROWS[1]).inputs == (0, 8, 13)
    assert chains(ROWS) == {7: [0, 1, 2]}
    assert [list(mb.begun_ids) for mb in ROWS] == [[7], [3], []]
    assert [len(mb.begun_ids) for mb in ROWS] == [1, 1, 0]
    assert [mb.real_tokens for mb in ROWS] == [9, 8 + 6, 4]  # 21 and 6 tokens in all


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(cut(0, 8)), row(cut(9, 20))], "from position 8 on, got 9 to 20 in micro-batch 1"),
        ([row(cut(0, 8)), row(cut(7, 20))], "from position 8 on, got 7 to 20 in micro-batch 1"),
        ([row(cut(4, 20))], "from position 0 on, got 4 to 20 in micro-batch 0"),
        ([row(cut(0, 8)), row(cut(8, 19))], "pieces up to position 20, got 19"),
        ([row(cut(0, 8)), row(cut(8, 8)), row(cut(8, 20))], "from position 8 on, got 8 to 8"),
        ([row(cut(0, 8), cut(8, 20))], "every piece in a micro-batch of its own, got two in one"),
        ([row(cut(0, 8)), row(cut(8, 20, tokens=25))], "pieces up to position 24, got 20"),
    ],
)
def test_pieces_that_do_not_tile_are_refused(rows: list[MicroBatch], message: str) -> None:
    check_pieces(GPT, 0, ROWS)
    check_pieces(GPT, 0, [row(WHOLE), row(cut(0, 20))])
    with pytest.raises(PlanError, match=message):
        check_pieces(GPT, 0, rows)
    with pytest.raises(PlanError, match="expected whole samples of a t5 model, got a piece"):
        check_pieces(T5, 0, rows)


def passes(text: str) -> list[Instruction]:
    return [parse_instruction(word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 F1 F2 B2 B1 B0", None),
        ("F0 F1 F2", None),
        ("F0 F1 F2 F0.1 F1.1 F2.1 B2.1 B1.1 B0.1 B2 B1 B0", None),
        ("F0 F2 F1 B2 B1 B0", "stage 4: expected the forward passes of sample 7's pieces in the order .* 0, 1, 2"),
        ("F0 F1 F2 B0 B1 B2", "stage 4: expected the backward passes of sample 7's pieces in the order .* 2, 1, 0"),
        ("F0 F1 F2 F1.1 F0.1 F2.1 B2.1 B1.1 B0.1 B2 B1 B0", "expected the forward passes"),
    ],
)
def test_chains_out_of_order_are_refused(text: str, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(PlanError, match=message):
        check_chain_order(4, ROWS, passes(text))
