"""Rotary embeddings of a packed row: each position's place in its own sample.

The module makes the first positions' rotations, by whatever rules it has, and the row's are picked from them. Megatron
keeps what it has made for the latest 32 lengths; here lengths are powers of two, so that all of them are few.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from megatron_dynapipe.megatron.equip.told import Channel

_MARK = "_dynapipe_rotations"
_DIMENSIONS = 4
"""The number of dimensions of rotations [positions, 1, 1, channels]."""


def equip_rotations(chunks: Sequence[nn.Module], channel: Channel) -> None:
    """Have the rotary embeddings of model chunks follow the row that is told."""
    for chunk in chunks:
        embeddings = [module for module in chunk.modules() if isinstance(module, RotaryEmbedding)]
        parts = {part for embedding in embeddings for part in embedding.modules() if part is not embedding}
        for embedding in embeddings:
            if embedding not in parts and _MARK not in vars(embedding):
                vars(embedding).update({"forward": partial(_rotations, embedding.forward, channel), _MARK: True})


def _rotations(make: Callable[..., Any], channel: Channel, length: int, *arguments: object, **keywords: object) -> Any:
    """The rotations of `length` positions, or of a row's; one tensor, or one with a scale (YaRN)."""
    row = channel.told.row
    needed = length if row is None else int(row.max_seqlen_kv)
    most = 1 << max(needed - 1, 0).bit_length()
    made = make(most, *arguments, **keywords)
    rotations: Tensor = made[0] if isinstance(made, tuple) else made
    axis = rotations.dim() - _DIMENSIONS  # a module may stack the rotations of two bases
    if row is None:
        rotations = rotations.narrow(axis, 0, length)
    else:
        assert row.positions is not None, "a row of queries has positions"
        rotations = rotations.index_select(axis, row.positions[0].to(rotations.device))
    return (rotations, *made[1:]) if isinstance(made, tuple) else rotations
