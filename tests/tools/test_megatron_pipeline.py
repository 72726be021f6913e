"""Stepping a pipeline without Megatron's loop: the example, evaluation, and what is refused."""

import contextlib
import gc
import runpy
from pathlib import Path

import pytest

from tests.helpers.layouts.layout import Layout, on_ranks
from tests.helpers.processes import in_ranks, run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_steps.py"


def run_example(rank: int, world_size: int) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["main"]()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_learns(ranks):
    losses, *others = run_ranks(run_example, ranks)
    assert all(other == losses for other in others), "every rank is told the loss"
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_evaluation_gives_the_loss_and_leaves_gradients_and_masks_alone(rows):
    for result in on_ranks("probes.evaluate", Layout(family="t5", stages=2, dropout=0.1, rows=rows)):
        assert result["first"] == result["second"]
        assert result["training"] and result["untouched"]


def test_a_batch_can_be_planned_before_it_is_run():
    for result in on_ranks("probes.planned_before", Layout(stages=2)):
        first, second = result["losses"]
        assert first == second and result["same_plan"] and result["ran_the_list"]


REFUSED = {
    "layout": "layout of data × tensor × pipeline parallel ranks × chunks 1 × 1 × 2 × 1, got 1 × 1 × 1 × 1",
    "loss": "calculate_per_token_loss",
    "fp8": "fp8_recipe cannot be used with planned passes: its scales are agreed on in every pass",
    "modules": "expected --recompute-modules among core_attn, mlp, moe, shared_experts, got layernorm",
    "optimizer": "expected an optimizer to step with, got none",
    "batch": "expected a batch of at least one sample, got none",
}


def test_what_cannot_be_run_is_refused():
    (found,) = on_ranks("probes.refused", Layout(attention="megatron"))
    assert found.keys() == REFUSED.keys()
    for wanted, said in REFUSED.items():
        assert said in found[wanted], wanted


@in_ranks(1)
def test_a_mask_is_made_only_for_attention_that_does_not_know_causality():
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_dynapipe.megatron.execution.step_functions import takes_mask
    from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention

    for kind, takes in ((DotProductAttention, True), (SdpaCoreAttention, False)):
        attention = kind.__new__(kind)
        torch.nn.Module.__init__(attention)
        assert takes_mask([torch.nn.Sequential(torch.nn.Linear(1, 1), attention)]) == takes


@in_ranks(2)
def test_a_pipelines_lists_are_watched_for_as_long_as_it_lives(rank):
    """On a device that needs watching."""
    from megatron_dynapipe.runtime import rank as runners
    from tests.helpers.layouts.trainer import Trainer

    seen, ended = [], []

    @contextlib.contextmanager
    def watched(device, *, deadline_s, rank):
        yield lambda plan, trace: seen.append((plan.stage, len(trace)))
        ended.append(deadline_s)

    runners.watched = watched
    trainer = Trainer(Layout(stages=2))
    trainer.pipeline.step(trainer.batch)
    assert (seen, ended) == ([(rank, 0)], [])
    del trainer
    gc.collect()
    assert ended == [300.0]
