"""The codec under hostile bytes: one kind of error, nothing accepted that was changed, no memory for forged lengths."""

import contextlib
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanDecodeError, PlanError
from megatron_dynapipe.store import codec
from megatron_dynapipe.ways.rules import verify
from tests.helpers.plans import make_plan

PLAN = make_plan((3, 2), 2)
WHOLE = codec.encode(PLAN)
ENTRY = codec.encode_entries(PLAN)[0][2]
HEADER = codec._HEADER.size
DECODERS = [codec.decode_plan, codec.decode_entry]


def signed(payload: bytes) -> bytes:
    """A payload behind a header that fits it, as an attacker would write it."""
    return codec._HEADER.pack(codec.MAGIC, codec.VERSION, codec._checksum(payload)) + payload


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=300))
@example(data=b"\x91" * 1_000_000)  # arrays within arrays
def test_any_bytes_are_refused_behind_a_header_that_fits_too(decode, data: bytes) -> None:
    for forged in (data, signed(data)):
        with pytest.raises(PlanDecodeError):
            decode(forged)


@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
    end=st.floats(0, 1),
)
def test_changed_plans_are_refused(edits: list[tuple[float, int]], end: float) -> None:
    """Several bytes at once, and a piece cut off."""
    data = bytearray(ENTRY)
    for place, byte in edits:
        data[int(place * len(data))] = byte
    del data[int(end * len(data)) :]
    if data != ENTRY:
        with pytest.raises(PlanDecodeError):
            codec.decode_entry(bytes(data))


@pytest.mark.parametrize(("whole", "decode"), [(WHOLE, codec.decode_plan), (ENTRY, codec.decode_entry)])
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=6)), max_size=4))
def test_what_is_accepted_behind_a_forged_checksum_is_one(whole: bytes, decode, edits) -> None:
    """Also: verification of a plan that decodes ends in one kind of error."""
    payload = bytearray(whole[HEADER:])
    for place, piece in edits:
        at = int(place * len(payload))
        payload[at : at + len(piece)] = piece
    try:
        found = decode(signed(bytes(payload)))
    except PlanDecodeError:
        assert payload != whole[HEADER:]
        return
    assert decode(codec.encode(found)) == found
    if decode is codec.decode_plan and found != PLAN:
        with contextlib.suppress(PlanError):
            verify(found)


@pytest.mark.parametrize(
    "start",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # a string
        b"\x9a\x00\x00\xa3gpt\xc2\xdb\xff\xff\xff\xff",  # an entry whose digest is one
        b"\x9a\x00\x00\xa3gpt\xc2\xa0\x01\x01\xdd\xff\xff\xff\xff",  # an entry of 2^32 - 1 micro-batches
    ],
)
@pytest.mark.parametrize("decode", DECODERS)
def test_a_forged_length_takes_no_memory(decode, start: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PlanDecodeError):
            decode(signed(start + bytes(100)))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [0, codec.VERSION - 1, codec.VERSION + 1, 65535])
def test_other_versions_are_refused_before_anything_is_read(version: int) -> None:
    forged = codec._HEADER.pack(codec.MAGIC, version, bytes(16)) + b"\xff" * 50
    with pytest.raises(PlanDecodeError, match=f"expected plan format version {codec.VERSION}, got {version}") as caught:
        codec.decode_entry(forged)
    assert caught.value.hint == "plan again with the installed version of megatron_dynapipe"
