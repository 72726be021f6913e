"""Rotations that Megatron keeps: of lengths that are powers of two, whatever lengths are asked for."""

from tests.helpers.processes import in_ranks


@in_ranks(1)
def test_few_lengths_are_kept():
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from torch import nn

    from megatron_dynapipe.megatron.equip.rotations import equip_rotations
    from megatron_dynapipe.megatron.equip.told import Channel

    rotary, alone = (RotaryEmbedding(8, 1.0, use_cpu_initialization=True) for _ in range(2))
    equip_rotations([nn.ModuleDict({"rotary": rotary})], Channel())
    made: set[int] = set()
    get_emb = rotary.get_emb
    rotary.get_emb = lambda length, offset=0: (made.add(length), get_emb(length, offset))[1]
    for length in range(1, 100):
        assert torch.equal(rotary(length, packed_seq=True), alone(length, packed_seq=True))
    assert made == {1, 2, 4, 8, 16, 32, 64, 128}
