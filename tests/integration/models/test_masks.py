from tests.helpers.processes import run_ranks


def check(rank: int, world_size: int) -> None:
    import torch

    from megatron_dynapipe.data.masks import cross_mask, decoder_mask, encoder_mask
    from megatron_dynapipe.integration.models.masks import LocalMasks, TransformerEngineMasks

    inputs, targets = torch.tensor([3, 1]), torch.tensor([2, 4])
    encoder, decoder, cross = encoder_mask(inputs, 3), decoder_mask(targets, 4), cross_mask(inputs, 4, 3)
    assert LocalMasks.encoder(encoder) is encoder and LocalMasks.decoder(decoder) is decoder
    assert LocalMasks.cross(decoder, cross) is cross
    padding = torch.tensor([[False, False, False], [False, True, True]])[:, None, None]
    target_padding = torch.tensor([[False, False, True, True], [False, False, False, False]])[:, None, None]
    assert torch.equal(TransformerEngineMasks.encoder(encoder), padding)
    assert TransformerEngineMasks.decoder(decoder) is None
    queries, keys = TransformerEngineMasks.cross(decoder, cross)
    assert torch.equal(queries, target_padding) and torch.equal(keys, padding)


def test_masks_of_local_layers_and_of_transformer_engine():
    run_ranks(check, 1)
