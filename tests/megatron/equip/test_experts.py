"""Routers: terms that no partition changes, and that are Megatron's where all samples are of one length."""

from unittest import mock

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.data.collate import sample_numbers
from megatron_dynapipe.megatron.equip import experts
from megatron_dynapipe.megatron.equip.experts import RouterTerms
from megatron_dynapipe.megatron.models.divided_linears import WeightHalves
from megatron_dynapipe.megatron.models.grouped_experts import GroupedExperts, takes_grouped
from megatron_dynapipe.megatron.models.labelled_rows import RowGather
from tests.helpers.lists import micro_batch
from tests.helpers.processes import in_ranks
from tests.megatron.models.attention_ranks import config, start

HIDDEN, EXPERTS, LENGTHS = 6, 4, (8, 8, 8)


def planned(lengths, *, packed: bool, positions: int = 8):
    shape = Shape(1 if packed else max(len(lengths), 1), positions, 0)
    layout = BatchLayout.PACKED if packed else BatchLayout.PADDED
    return micro_batch(shape, [length + 1 for length in lengths], layout=layout)


@in_ranks(1)
def test_terms_are_megatrons_and_no_partition_changes_them():
    """Gradients of the routers' weight: Megatron's of three samples of one length, and ours in several partitions."""
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
    mine, theirs = (TopKRouter(config=made, pg_collection=groups) for _ in range(2))
    mine.load_state_dict(theirs.state_dict())
    experts.equip_experts([mine])
    assert isinstance(mine, RouterTerms) and type(mine).__name__ == "TopKRouter"

    def of(router: TopKRouter, states: Tensor) -> Tensor:
        router.weight.grad = None
        router(states)[0].sum().mul(0.0).backward()  # the terms alone
        return router.weight.grad

    def ours(*micro_batches) -> Tensor:
        mine.weight.grad = None
        for states, plan in micro_batches:
            lengths = plan.positions(ModelFamily.GPT)
            samples = torch.from_numpy(sample_numbers(lengths, *plan.shape[:2]))
            mine.begin(samples, len(lengths))
            mine(states)[0].sum().mul(0.0).backward()
        return mine.weight.grad

    def padded(states: Tensor, length: int) -> Tensor:
        return torch.cat([states, torch.randn(length - len(states), 1, HIDDEN)])

    row = padded(torch.cat(samples), 32)
    filler = padded(samples[0][:0], 8), planned((), packed=False)
    longer = [(padded(each, 16), planned((8,), packed=False, positions=16)) for each in samples]
    expected = of(theirs, torch.cat(samples, dim=1))
    assert expected.abs().max() > 1e-3
    for gradient in (
        ours((torch.cat(samples, dim=1), planned(LENGTHS, packed=False))),
        ours(*longer, filler),
        ours((row, planned(LENGTHS, packed=True, positions=32))),
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "bound", "device"),
    [("float32", 1e-5, "cpu"), ("bfloat16", 0.1, "cpu"), pytest.param("bfloat16", 0.1, "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("counts", [[5, 0, 7, 1], [0, 0, 3], [0, 0]], ids=str)
@in_ranks(1)
def test_experts_in_one_product_are_those_one_by_one(counts, dtype, bound, device):
    """Results and gradients are those of Megatron's experts, in whole passes and in divided ones."""
    start()
    kind = getattr(torch, dtype)
    made = config(
        hidden_size=16,
        num_attention_heads=1,
        num_moe_experts=len(counts),
        moe_ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=kind,
    )
    parts = LocalSpecProvider().grouped_mlp_modules(False).keywords
    groups = ProcessGroupCollection.use_mpu_process_groups()
    theirs, ours = (
        cls(len(counts), made, pg_collection=groups, **parts).to(device) for cls in (SequentialMLP, GroupedExperts)
    )
    ours.load_state_dict(theirs.state_dict())
    tokens, probs = torch.randn(sum(counts), 16, dtype=kind, device=device), torch.rand(sum(counts), device=device)
    halves = ours.halves = WeightHalves()

    def run(module: SequentialMLP) -> list[Tensor]:
        leaves = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
        output, bias = module(leaves[0], torch.tensor(counts), leaves[1])
        assert bias is None
        (output * torch.arange(16.0, device=device).cos()).sum().backward()
        weights = [weight for _, weight in sorted(module.named_parameters())]
        if halves.key is not None:
            assert all(weight.grad is None for weight in weights)
            halves.add_weight_gradients(halves.key)
        gradients = [weight.grad for weight in weights]
        module.zero_grad()
        return [output, *(leaf.grad for leaf in leaves), *gradients]

    expected, waited = run(theirs), []
    for expert in ours.local_experts:  # as hooks that gather parameters
        expert.linear_fc2.register_forward_pre_hook(lambda linear, _: waited.append(linear))
    for key in (None, (3, 0)):
        halves.key = key
        differences = [a if b is None else a - b for a, b in zip(run(ours), expected, strict=True)]
        assert max(each.abs().max().item() for each in differences if each.numel()) < bound
    assert len(waited) == 2 * len(counts)


def test_groups_need_a_device_that_reads_offsets_itself(monkeypatch):
    cuda = torch.device("cuda")
    for capability, dtype, takes in (
        ((9, 0), torch.bfloat16, True),
        ((9, 0), torch.float16, False),
        ((8, 0), torch.bfloat16, False),
    ):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, found=capability: found)
        assert takes_grouped(cuda, dtype) is takes
    assert takes_grouped(torch.device("cpu"), torch.float32)


@in_ranks(2)
def test_layers_of_a_pass_ask_for_the_most_positions_once(rank):
    """The last of three layers runs rows with labels alone in the second pass, and first, as where it is recomputed."""
    torch.distributed.init_process_group("gloo")
    layers = [experts.UnevenAllGather.__new__(experts.UnevenAllGather) for _ in range(3)]
    seen, gather = [], RowGather()
    layers[2].gather = gather
    with (
        mock.patch.object(
            MoEAllGatherTokenDispatcher, "dispatch_preprocess", lambda _, hidden, __, probs: (hidden, probs)
        ),
        mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as asking,
    ):
        for positions, rows in ((4 + rank, None), (9 - rank, 2 + rank)):
            experts.begin_pass(layers)
            gather.rows, padded = None if rows is None else torch.arange(rows), []
            for layer in reversed(layers):
                layer.tp_ep_group = torch.distributed.group.WORLD
                runs = positions if rows is None or layer is not layers[2] else rows
                padded.append(len(layer.dispatch_preprocess(*torch.ones(3, runs, 2).unbind())[0]))
            seen.append([asking.call_count, padded])
    assert seen == [[1, [5, 5, 5]], [3, [3, 9, 9]]]
