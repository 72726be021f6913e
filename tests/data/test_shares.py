"""Shares of samples: what members hold is the whole sample, and their keys are those before them, in order."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape, round_up
from megatron_dynapipe.data.collate import Collator, HostMicroBatch, RequiredFields
from megatron_dynapipe.data.iterator import in_one_buffer
from megatron_dynapipe.tools.megatron_pipeline import Tokens, reader_of
from tests.helpers.lists import micro_batch

GPT = ModelFamily.GPT
FIRST = 1000
"""Token of a sample's first position; the sample counts the thousands."""


def shares(lengths: list[int], ranks: int, layout: BatchLayout, *, spare: int = 0) -> list[MicroBatch]:
    """A micro-batch of samples of these positions, of every member."""
    own = [2 * -(-length // (2 * ranks)) for length in lengths]
    packed = layout is BatchLayout.PACKED
    shape = Shape(1, round_up(sum(own)) + spare) if packed else Shape(len(lengths), round_up(max(own)) + spare)
    tokens = [length + 1 for length in lengths]
    made = [micro_batch(Shape(1, 8), [9], sample_ids=(0,)) for _ in range(ranks)]
    fields = {"sample_ids": tuple(range(len(lengths))), "target_lengths": (0,) * len(lengths), "layout": layout}
    from msgspec.structs import replace

    return [
        replace(one, shape=shape, input_lengths=tuple(tokens), share=(ranks, place), **fields)
        for place, one in enumerate(made)
    ]


def collated(lengths: list[int], plans: list[MicroBatch]) -> list[HostMicroBatch]:
    samples = [([FIRST * (n + 1) + at for at in range(length + 1)], []) for n, length in enumerate(lengths)]
    collate = Collator(required=RequiredFields(tokens=True, labels=True), reader=reader_of(samples), special=Tokens())
    return [collate(0, plan, GPT) for plan in plans]


cases = given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(list(BatchLayout)),
    st.sampled_from([0, 8]),
)


@cases
def test_members_hold_every_position_once(lengths: list[int], ranks: int, layout: BatchLayout, spare: int) -> None:
    hosts = collated(lengths, shares(lengths, ranks, layout, spare=spare))
    held: list[tuple[int, int]] = []
    for host in hosts:
        assert host.tokens is not None and host.labels is not None and host.loss_mask is not None
        counts = host.loss_mask == 1
        held += zip(host.tokens[counts].tolist(), host.labels[counts].tolist(), strict=True)
        assert host.tokens.shape == host.labels.shape == host.shape[:2]
    expected = [FIRST * (n + 1) + at for n, length in enumerate(lengths) for at in range(length)]
    assert sorted(held) == [(token, token + 1) for token in expected]


@cases
def test_every_segment_attends_to_its_sample_up_to_its_end(
    lengths: list[int], ranks: int, layout: BatchLayout, spare: int
) -> None:
    """Keys are known by the tokens of their positions; padding's are 0."""
    hosts = collated(lengths, shares(lengths, ranks, layout, spare=spare))
    keys = torch.cat([host.tokens.T.flatten() for host in hosts if host.tokens is not None])
    for host in hosts:
        row = host.input_segments
        assert row is not None and row.key_places is not None and row.key_offsets is not None
        assert host.tokens is not None
        queries = host.tokens.flatten().split(row.lengths)
        attended = keys[row.key_places].split(row.key_offsets.diff().tolist())
        places = row.positions.expand(host.shape.size, -1).flatten().split(row.lengths)
        for segment, (its, seen, at) in enumerate(zip(queries, attended, places, strict=True)):
            assert torch.equal(seen[len(seen) - len(its) :], its), "its own keys are the last"
            if segment == len(queries) - 1:
                continue
            first = FIRST * (segment // 2 + 1)
            real = min(len(seen), lengths[segment // 2])
            assert seen.tolist() == [*range(first, first + real), *[0] * (len(seen) - real)]
            assert [place for place, token in zip(at.tolist(), its.tolist(), strict=True) if token] == [
                token - first for token in its.tolist() if token
            ]
            assert int(at.max()) < max(lengths)
        copied = in_one_buffer(host, pin=False).input_segments
        assert copied is not None and copied.key_places is not None
        assert np.array_equal(copied.key_places, row.key_places)
