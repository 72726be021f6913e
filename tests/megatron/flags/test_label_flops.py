"""The operations that a position without a label leaves out are those of the modules that leave it out."""

import pytest

from megatron_dynapipe.choosing.planners import tables_of
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.pattern import expert_modules
from megatron_dynapipe.costing.shape import Experts
from megatron_dynapipe.megatron.flags.run_config import label_flops
from megatron_dynapipe.tools.tuning.evaluate import token_flops
from tests.core.planner_cases import cost_model, settings

HIDDEN, FFN, VOCABULARY, EXPERTS, EXPERT_FFN = 128, 512, 4096, 4, 256
DENSE, ROUTED = 2 * FFN, 2 * 2 * EXPERT_FFN + EXPERTS
"""Weights, over the hidden size, of an MLP, and of two experts and their router."""


@pytest.mark.parametrize(
    ("pattern", "split", "reaches_experts", "mlp"),
    [
        ("*-*-", (2, 2), False, DENSE),
        ("*-*-", (4, 0), False, 0),
        ("*-*", (2, 1), False, 0),
        ("*E*-", (2, 2), False, DENSE),
        ("*-*E", (2, 2), True, ROUTED),
        ("*-*E", (2, 2), False, 0),
        ("*E*E", (2, 2), True, ROUTED),
        ("*E*E", (2, 2), False, 0),
    ],
)
def test_operations_of_modules_over_labels(
    pattern: str, split: tuple[int, int], reaches_experts: bool, mlp: int
) -> None:
    experts = None
    if "E" in pattern:
        experts = Experts(count=EXPERTS, per_token=2, ffn=EXPERT_FFN, layers=expert_modules(pattern))
    model = cost_model(ModelFamily.GPT, hidden=HIDDEN, vocabulary=VOCABULARY, experts=experts)
    planned = settings(
        ModelFamily.GPT,
        encoder_layers=len(pattern),
        pattern=pattern,
        layers_per_stage=split,
        label_experts=reaches_experts,
    )
    expected = 6 * HIDDEN * (VOCABULARY + mlp)
    assert label_flops(planned, model.shape) == expected
    if experts is None:  # of which tune counts no operations
        state = tables_of(planned, model)[0].state
        assert token_flops(planned, state) - token_flops(planned, state, 0.0) == pytest.approx(expected, rel=0.01)
