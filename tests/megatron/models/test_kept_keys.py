"""Attention of a sample in pieces is that of the whole sample."""

import weakref
from functools import partial
from itertools import pairwise, product
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.megatron.models import attention as attention_module
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.engine_attention import EngineCoreAttention
from megatron_dynapipe.megatron.models.kept_keys import KeptPiece, clear_kept_keys
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, PackedRow, self_row
from tests.helpers.processes import in_ranks
from tests.megatron.models.attention_ranks import (
    BY_ENGINE,
    CHANNELS,
    assert_alike,
    config,
    inputs,
    kernel,
    on_device,
    start,
)

CASES = (
    # groups, whether recomputed, how
    (4, False, "samples"),
    (4, True, "samples"),
    (2, False, "samples"),
    (2, True, "samples"),
    (2, False, "masks"),
    (4, True, "masks"),
    (2, False, "kernel"),
    (4, True, "kernel"),
    (2, False, "engine"),
    (4, True, "engine"),
)

ENDS = (0, 7, 12, 20)
"""Where sample 5 is cut."""
OTHERS = (3, 4, 6)
"""Positions of the whole sample beside each piece."""
Heads = list[Tensor]
"""Query, key and value [t, 1, heads or groups, channels]."""
ON_CPU = ("cpu", torch.float32)


def row_of(piece: int, device: str = "cpu") -> PackedRow:
    """A piece, a whole sample and a tail of 2 positions."""
    length = ENDS[piece + 1] - ENDS[piece]
    cut = {0: CutSegment(5, ENDS[piece], piece < len(ENDS) - 2)}
    host = RowSegments.of([0, length, length + OTHERS[piece]], length + OTHERS[piece] + 2, cut)
    assert host.positions[0, 0] == ENDS[piece], "positions go on"
    made = DeviceSegments(host=host, offsets=host.offsets, positions=host.positions, key_offsets=host.key_offsets)
    return on_device(self_row(made), device)


def attention_of(groups: int, channels: int = CHANNELS, *, engine: bool = False) -> SdpaCoreAttention:
    of = EngineCoreAttention if engine else SdpaCoreAttention
    return of(config(num_query_groups=groups, kv_channels=channels), 1, AttnMaskType.causal, "self")


def rows_of(whole: Heads, rest: list[Heads]) -> list[Heads]:
    """Each piece of the whole sample, with another sample behind it."""
    parts = [slice(*ENDS[piece : piece + 2]) for piece in range(len(OTHERS))]
    return [
        [torch.cat([tensor[part], beside]) for tensor, beside in zip(whole, other, strict=True)]
        for part, other in zip(parts, rest, strict=True)
    ]


def attends_as_whole(
    groups: int,
    channels: int = CHANNELS,
    *,
    recompute: bool,
    dropout: float = 0.0,
    engine: bool = False,
    place=ON_CPU,
    atol: float = 1e-5,
) -> None:
    attention = attention_of(groups, channels, engine=engine)
    attention.dropout = dropout
    *tensors, gradient = (tensor.to(*place) for tensor in inputs(ENDS[-1], ENDS[-1], groups, channels=channels))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    made = [inputs(length + 2, length + 2, groups, channels=channels)[:3] for length in OTHERS]
    rest = [[tensor.to(*place) for tensor in tensors] for tensors in made]
    results = []
    for piece, row in enumerate(rows_of(leaves, rest)):
        attend = partial(attention, attention_mask=None, packed_seq_params=row_of(piece, place[0]))
        results.append(checkpoint(attend, *row, use_reentrant=True) if recompute else attend(*row))
    assert len(attention.kept_keys) == len(ENDS) - 2, "all but the last piece's"
    lengths = [end - begin for begin, end in pairwise(ENDS)]
    for length, result, part in reversed(list(zip(lengths, results, gradient.split(lengths), strict=True))):
        result[:length].backward(part)
    assert len(attention.kept_keys) == 0, "backward passes leave nothing"
    again = [tensor.detach().requires_grad_() for tensor in tensors]
    expected = attention(*again, None)
    expected.backward(gradient)
    joined = torch.cat([result[:length] for length, result in zip(lengths, results, strict=True)])
    assert_alike([joined, *(leaf.grad for leaf in leaves)], [expected, *(leaf.grad for leaf in again)], atol)
    for length, other, result, own in zip(lengths, OTHERS, results, rest, strict=True):
        alone = attention(*[tensor[:other] for tensor in own], None)
        assert_alike([result[length : length + other]], [alone], atol)


@in_ranks(1)
def test_pieces_attend_as_the_whole_sample_and_others_of_their_rows_as_if_alone():
    start()
    for groups, recompute, how in CASES:
        if how not in ("kernel", "engine"):
            attends_as_whole(groups, recompute=recompute, dropout=1e-12 if how == "masks" else 0.0)
            continue
        joined = attention_module.attend_pieces_in_kernel
        with kernel(how), patch.object(attention_module, "attend_pieces_in_kernel", side_effect=joined) as calls:
            attends_as_whole(groups, recompute=recompute, engine=how == "engine")
        assert calls.call_count == (len(ENDS) - 2) * (1 + recompute), "the first piece's keys are not copied"


def test_no_mask_of_a_piece_outlives_its_attention_on_a_cpu():
    """A row lives until its backward pass: with masks in it, all rows under way would hold all their pieces' masks."""
    row = row_of(1)
    mask = row.later_keys(0, torch.zeros(1))
    assert mask.shape == (1, 1, ENDS[2] - ENDS[1], ENDS[2]) and mask.isinf().sum() == 10
    freed = weakref.ref(mask)
    del mask
    assert freed() is None


@pytest.mark.gpu
@pytest.mark.parametrize("engine", BY_ENGINE)
@in_ranks(1)
def test_pieces_in_the_kernel_attend_as_the_whole_sample(engine):
    """In bf16, within its rounding of sums."""
    start()
    for groups, channels, recompute in product((4, 2), (CHANNELS, 64, 128), (False, True)):
        on_gpu = ("cuda", torch.bfloat16)
        attends_as_whole(groups, channels, recompute=recompute, engine=engine, place=on_gpu, atol=0.1)


@in_ranks(1)
def test_a_piece_without_those_before_it_is_refused_and_a_broken_iteration_is_cleared_away():
    start()
    attention = attention_of(4)
    rest = [inputs(length + 2, length + 2)[:3] for length in OTHERS]
    rows = rows_of(inputs(ENDS[-1], ENDS[-1])[:3], rest)
    with pytest.raises(ExecutionError, match="expected keys of 7 earlier positions of sample 5, found 0"):
        attention(*rows[1], None, packed_seq_params=row_of(1))
    for piece, row in enumerate(rows):
        attention(*row, None, packed_seq_params=row_of(piece))
    assert len(attention.kept_keys) == 2
    clear_kept_keys([attention])
    assert len(attention.kept_keys) == 0


@pytest.mark.parametrize(("pieces", "dtype"), [(3, "bfloat16"), (4, "float32"), (20, "float32")])
def test_gradients_of_many_later_pieces_are_summed_in_fp32(pieces, dtype):
    """In bf16 what is less than a 256th of a sum would be lost in it."""
    kept = KeptPiece(0, 0, *torch.zeros(2, 2, 1, 4, dtype=torch.bfloat16))
    for piece in range(pieces):
        gradient = torch.full((2, 1, 4), 0.002 if piece else 1.0, dtype=torch.bfloat16)
        torch.autograd.backward(kept.read(), [gradient, gradient.clone()])
    assert {str(total.dtype) for total in kept.gradients} == {f"torch.{dtype}"}
    expected = 1 + 0.002 * max(0, pieces - 3)  # the first two are lost
    torch.testing.assert_close(kept.gradients[0].float(), torch.full((2, 1, 4), expected), rtol=0, atol=1e-4)
