"""What the rank of the tests of kept keys runs: a sample in pieces beside the same sample whole."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.errors import ExecutionError
from megatron_dynapipe.integration.models import attention as attention_module
from megatron_dynapipe.integration.models import packed_attention
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention
from megatron_dynapipe.integration.models.engine_attention import EngineCoreAttention
from megatron_dynapipe.integration.models.kept_keys import clear_kept_keys
from megatron_dynapipe.integration.models.packed_rows import DeviceSegments, PackedRow, RowFormat, self_row
from tests.integration.models.attention_ranks import config, start
from tests.integration.models.packed_ranks import by_kernel, engine_on_path, inputs

ENDS = (0, 7, 12, 20)
"""Where sample 5 is cut."""
OTHERS = (3, 4, 6)
"""Positions of the whole sample beside each piece."""
Heads = list[Tensor]
"""Query, key and value [t, 1, heads or groups, channels]."""


def row_of(piece: int) -> PackedRow:
    """A piece, a whole sample and a tail of 2 positions."""
    length = ENDS[piece + 1] - ENDS[piece]
    cut = {0: CutSegment(5, ENDS[piece], piece < len(ENDS) - 2)}
    host = RowSegments.of([0, length, length + OTHERS[piece]], length + OTHERS[piece] + 2, cut)
    assert host.positions[0, 0] == ENDS[piece], "positions go on"
    made = DeviceSegments(host=host, offsets=host.offsets, positions=host.positions, key_offsets=host.key_offsets)
    return self_row(made, RowFormat.LOCAL)


def attention_of(groups: int, *, engine: bool = False) -> SdpaCoreAttention:
    of = EngineCoreAttention if engine else SdpaCoreAttention
    return of(config(num_query_groups=groups), 1, AttnMaskType.causal, "self")


def in_pieces(attention: SdpaCoreAttention, whole: Heads, rest: list[Heads], *, recompute: bool) -> Heads:
    """Every row's result; autograd reaches the whole sample's heads through its pieces."""
    results = []
    for piece, other in enumerate(rest):
        part = slice(ENDS[piece], ENDS[piece + 1])
        row = [torch.cat([tensor[part], beside]) for tensor, beside in zip(whole, other, strict=True)]

        attend = partial(attention, attention_mask=None, packed_seq_params=row_of(piece))
        results.append(checkpoint(attend, *row, use_reentrant=True) if recompute else attend(*row))
    return results


def compare_all(rank: int, world_size: int, cases: list[tuple[int, bool, str]]) -> list[list[float]]:
    start()
    found = []
    for groups, recompute, how in cases:
        if how in ("kernel", "engine"):
            joined = attention_module.attend_pieces_in_kernel
            with (
                patch.object(attention_module, "kernel_takes", lambda *_, **__: True),
                patch.object(packed_attention, "varlen_attn", by_kernel if how == "kernel" else None),
                engine_on_path(),
                patch.object(attention_module, "attend_pieces_in_kernel", side_effect=joined) as calls,
            ):
                found.append(compare(groups, recompute=recompute, engine=how == "engine"))
            assert calls.call_count == (len(ENDS) - 2) * (1 + recompute), "the first piece's keys are not copied"
        else:
            found.append(compare(groups, recompute=recompute, dropout=1e-12 if how == "masks" else 0.0))
    return found


def compare(groups: int, *, recompute: bool, dropout: float = 0.0, engine: bool = False) -> list[float]:
    """Largest differences of results and gradients from the whole samples'."""
    attention = attention_of(groups, engine=engine)
    attention.dropout = dropout
    *tensors, gradient = inputs([ENDS[-1]], [ENDS[-1]], groups)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    rest = [inputs([length, 2], [length, 2], groups)[:3] for length in OTHERS]
    results = in_pieces(attention, leaves, rest, recompute=recompute)
    assert len(attention.kept_keys) == len(ENDS) - 2, "all but the last piece's"
    for piece in reversed(range(len(results))):
        length = ENDS[piece + 1] - ENDS[piece]
        results[piece][:length].backward(gradient[ENDS[piece] : ENDS[piece + 1]])
    assert len(attention.kept_keys) == 0, "backward passes leave nothing"
    again = [tensor.detach().requires_grad_() for tensor in tensors]
    expected = attention(*again, None)
    expected.backward(gradient)
    joined = torch.cat([each[: ENDS[at + 1] - ENDS[at]] for at, each in enumerate(results)])
    alone = [attention(*[tensor[:length] for tensor in rest[at]], None) for at, length in enumerate(OTHERS)]
    differences = [(joined - expected).abs().max().item()]
    differences += [(a.grad - b.grad).abs().max().item() for a, b in zip(leaves, again, strict=True)]
    for at, each in enumerate(results):
        length = ENDS[at + 1] - ENDS[at]
        differences.append((each[length : length + OTHERS[at]] - alone[at]).abs().max().item())
    return differences


def compare_on_gpu(rank: int, world_size: int, engine: bool) -> list[list[float]]:
    """In bf16, by the kernel itself."""
    start()
    on_host, row_on_host = inputs, row_of

    def on_gpu(*lengths: Any) -> Heads:
        return [tensor.to("cuda", torch.bfloat16) for tensor in on_host(*lengths)]

    def row_on_gpu(piece: int) -> PackedRow:
        row = row_on_host(piece)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "positions"):
            setattr(row, name, getattr(row, name).cuda())
        return row

    ways = [(groups, recompute) for groups in (4, 2) for recompute in (False, True)]
    with patch.dict(globals(), inputs=on_gpu, row_of=row_on_gpu):
        return [compare(groups, recompute=recompute, engine=engine) for groups, recompute in ways]


def refuse(rank: int, world_size: int) -> dict[str, str]:
    """What is said of pieces without those before them, and that clearing drops an iteration's rest."""
    start()
    *tensors, _ = inputs([ENDS[-1]], [ENDS[-1]], 4)
    rest = [inputs([length, 2], [length, 2], 4)[:3] for length in OTHERS]

    def said(act: Callable[[], object]) -> str:
        try:
            act()
        except ExecutionError as error:
            return error.message
        return "nothing"

    attention = attention_of(4)
    length = ENDS[2] - ENDS[1]
    row = [torch.cat([t[ENDS[1] : ENDS[2]], o]) for t, o in zip(tensors, rest[1], strict=True)]
    assert row[0].size(0) == length + OTHERS[1] + 2
    first = said(lambda: attention(*row, None, packed_seq_params=row_of(1)))
    in_pieces(attention, tensors, rest, recompute=False)
    kept = len(attention.kept_keys)
    clear_kept_keys([attention])
    return {"first": first, "kept": str(kept), "cleared": str(len(attention.kept_keys))}
