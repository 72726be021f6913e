from tests.helpers.processes import run_ranks


def check(rank: int, world_size: int) -> None:
    import torch

    from megatron_dynapipe.data.segments import cross_mask, decoder_mask, encoder_mask
    from megatron_dynapipe.integration.models.masks import MegatronMasks, SdpaMasks

    inputs, targets = torch.tensor([3, 1]), torch.tensor([2, 4])
    encoder, decoder, cross = encoder_mask(inputs, 3), decoder_mask(targets, 4), cross_mask(inputs, 4, 3)
    as_given, added = MegatronMasks(), SdpaMasks(torch.bfloat16)
    assert as_given.encoder(encoder) is encoder and as_given.decoder(decoder) is decoder
    assert as_given.cross(decoder, cross) is cross
    padding = torch.tensor([[False, False, False], [False, True, True]])[:, None, None]
    for mask in (added.encoder(encoder), added.cross(decoder, cross)):
        assert mask.dtype == torch.bfloat16
        assert torch.equal(mask == -torch.inf, padding) and torch.equal(mask == 0, ~padding)
    assert added.decoder(decoder) is None, "causality hides padding at the end"


def test_masks_in_the_forms_of_the_layers():
    run_ranks(check, 1)
