"""Routers: terms that no partition changes, and that are Megatron's where all samples are of one length."""

import torch
from torch import Tensor

from tests.helpers.processes import run_ranks

HIDDEN, EXPERTS, LENGTHS = 6, 4, (8, 8, 8)


def planned(lengths, *, packed: bool, positions: int = 8):
    from megatron_dynapipe.plan.iteration import MicroBatch
    from megatron_dynapipe.units import BatchLayout, Recompute, Shape

    return MicroBatch(
        sample_ids=tuple(range(len(lengths))),
        input_lengths=tuple(length + 1 for length in lengths),
        target_lengths=(0,) * len(lengths),
        shape=Shape(1, positions, 0) if packed else Shape(max(len(lengths), 1), positions, 0),
        layout=BatchLayout.PACKED if packed else BatchLayout.PADDED,
        recompute=Recompute.NONE,
        stored_bytes=(0,),
        peak_bytes=(0,),
    )


def gradients(rank: int, world_size: int) -> dict[str, list[float]]:
    """Of the routers' weight: Megatron's of three samples of one length, and ours in several partitions."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_dynapipe.integration.models.experts import PlannedRouter, begin_micro_batch
    from tests.integration.models.attention_ranks import config, start

    start()
    made = config(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"],
        moe_aux_loss_coeff=[0.3, 0.0],
        moe_z_loss_coeff=0.1,
        calculate_per_token_loss=True,
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(1)
    samples = [torch.randn(length, 1, HIDDEN) for length in LENGTHS]
    mine, theirs = (kind(config=made, pg_collection=groups) for kind in (PlannedRouter, TopKRouter))
    theirs.load_state_dict(mine.state_dict())

    def of(router: TopKRouter, *inputs: Tensor) -> list[float]:
        router.weight.grad = None
        for states in inputs:
            probs, _ = router(states)
            probs.sum().mul(0.0).backward()  # the terms alone
        return router.weight.grad.flatten().tolist()

    def ours(*micro_batches) -> list[float]:
        mine.weight.grad = None
        for states, plan in micro_batches:
            begin_micro_batch([mine], plan)
            mine(states)[0].sum().mul(0.0).backward()
        return mine.weight.grad.flatten().tolist()

    def padded(states: Tensor, length: int) -> Tensor:
        return torch.cat([states, torch.randn(length - len(states), 1, HIDDEN)])

    row = padded(torch.cat(samples), 32)
    filler = padded(samples[0][:0], 8), planned((), packed=False)
    longer = [(padded(each, 16), planned((8,), packed=False, positions=16)) for each in samples]
    return {
        "Megatron's": of(theirs, torch.cat(samples, dim=1)),
        "together": ours((torch.cat(samples, dim=1), planned(LENGTHS, packed=False))),
        "apart, padded, with a filler": ours(*longer, filler),
        "in one row": ours((row, planned(LENGTHS, packed=True, positions=32))),
    }


def test_terms_are_megatrons_and_no_partition_changes_them():
    (found,) = run_ranks(gradients, 1, deadline_s=60)
    expected = torch.tensor(found.pop("Megatron's"))
    assert expected.abs().max() > 1e-3
    for name, gradient in found.items():
        assert torch.allclose(torch.tensor(gradient), expected, rtol=1e-4, atol=1e-6), name
