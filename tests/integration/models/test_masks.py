from tests.helpers.processes import run_ranks


def check(rank: int, world_size: int) -> None:
    import torch

    from megatron_dynapipe.data.segments import cross_mask, decoder_mask, encoder_mask
    from megatron_dynapipe.integration.models.specs import CoreAttention
    from megatron_dynapipe.integration.models.t5_stage import T5Options

    inputs, targets = torch.tensor([3, 1]), torch.tensor([2, 4])
    encoder, decoder, cross = encoder_mask(inputs, 3), decoder_mask(targets, 4), cross_mask(inputs, 4, 3)
    unfused, ours = T5Options(attention=CoreAttention.MEGATRON), T5Options(attention=CoreAttention.SDPA)
    assert all(unfused.mask(mask, torch.bfloat16) is mask for mask in (encoder, cross))
    assert unfused.mask(decoder, torch.bfloat16, causal=True) is decoder
    padding = torch.tensor([[False, False, False], [False, True, True]])[:, None, None]
    for mask in (ours.mask(encoder, torch.bfloat16), ours.mask(cross, torch.bfloat16)):
        assert mask is not None and mask.dtype == torch.bfloat16
        assert torch.equal(mask == -torch.inf, padding) and torch.equal(mask == 0, ~padding)
    assert ours.mask(decoder, torch.bfloat16, causal=True) is None, "causality hides padding at the end"


def test_masks_in_the_forms_of_the_layers():
    run_ranks(check, 1)
