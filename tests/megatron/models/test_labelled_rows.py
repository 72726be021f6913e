"""Which modules run rows with labels alone; that losses and gradients are those of all rows is `test_exactness`'s."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_dynapipe.data.segments import causal_mask
from megatron_dynapipe.megatron.equip.experts import equip_experts
from megatron_dynapipe.megatron.models.labelled_rows import row_gather
from tests.helpers.processes import in_ranks
from tests.megatron.models.attention_ranks import config, start

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
ROWS, ALL = 8, 24
MODELS = {
    "dense": ({}, ROWS),
    "experts": (EXPERTS, ROWS),
    "experts with a term over all positions": (EXPERTS | {"moe_z_loss_coeff": 0.1}, ALL),
    "experts with a bias": (
        EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        ALL,
    ),
}


def _counted(flags: dict[str, object]) -> tuple[dict[str, int], dict[str, int], float]:
    """Rows that the first MLP, the last one and the head get: all, and with labels; the worst error of gradients."""
    made = config(num_layers=2, hidden_dropout=0.0, calculate_per_token_loss=True, add_bias_linear=False, **flags)
    layer = get_gpt_layer_local_spec(num_experts=made.num_moe_experts)
    torch.manual_seed(1)
    model = GPTModel(config=made, transformer_layer_spec=layer, vocab_size=64, max_sequence_length=12)
    equip_experts([model])
    seen: dict[str, int] = {}
    parts = {"first": model.decoder.layers[0].mlp, "last": model.decoder.layers[1].mlp, "head": model.output_layer}
    for part, module in parts.items():
        module.register_forward_pre_hook(
            lambda _module, inputs, part=part: seen.__setitem__(part, inputs[0].shape[:2].numel())
        )
    tokens, labels = torch.randint(64, (2, 2, 12))
    counts = torch.zeros(2, 12)
    counts[0, 3:5] = counts[1, 7:] = 1
    rows = torch.nn.functional.pad(counts.T.flatten().nonzero()[:, 0], (0, ROWS - 7))
    gather = row_gather([model])

    def gradients(rows: torch.Tensor | None, labels: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        gather.rows = rows
        losses = model(tokens, torch.arange(12).expand(2, -1), causal_mask(12, "cpu"), labels=labels)
        (losses * counts).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, everything = gradients(None, labels, counts), dict(seen)
    actual = gradients(rows, labels.T.reshape(1, -1)[:, rows], torch.tensor([[1.0] * 7 + [0.0]]))
    largest = max(float(gradient.abs().max()) for gradient in expected)
    worst = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
    return everything, seen, worst / largest


@in_ranks(1)
def test_modules_that_run_rows_with_labels_alone():
    start()
    for name, (flags, last) in MODELS.items():
        everything, rows, error = _counted(flags)
        assert everything == {"first": ALL, "last": ALL, "head": ALL}, name
        assert rows == {"first": ALL, "last": last, "head": ROWS}, name
        assert error == pytest.approx(0, abs=1e-6), name
