"""Teams: what the verifier says where members differ, and what a plan's numbers count once."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.cli.show import _text
from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.store.codec import decode_plan, encode, encode_entries
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import batch, planner
from tests.core.toy_executor import ToyPipeline
from tests.helpers.examples import examples
from tests.helpers.packed_plans import relaid, teamed

GPT = ModelFamily.GPT
replace = msgspec.structs.replace


def made(sizes: tuple[int, ...], *, samples: int = 20, seed: int = 0, layout: str = "mixed") -> IterationPlan:
    """A plan whose replicas are teams of these sizes."""
    plan = planner(GPT, data_parallel=len(sizes)).plan(batch(GPT, samples, seed=seed), 3)
    return teamed(relaid(plan, layout), sizes)


def member(plan: IterationPlan, number: int, **changes: object) -> IterationPlan:
    replicas = list(plan.replicas)
    replicas[number] = replace(replicas[number], **changes)
    return replace(plan, replicas=tuple(replicas))


def test_a_team_counts_its_samples_once() -> None:
    plan = made((2, 1, 1))
    alone = relaid(planner(GPT, data_parallel=3).plan(batch(GPT, 20), 3), "mixed")
    verify(plan, expected_samples=range(100, 120), fast_verify=fast_verify)
    assert plan.teams == (2, 1, 1) and alone.teams == (1, 1, 1)
    assert plan.totals.samples == 20 and plan.totals.real_tokens == alone.totals.real_tokens
    assert plan.totals.padded_positions >= alone.totals.padded_positions - 8
    first, second = (plan.replicas[number].micro_batches[0] for number in (0, 1))
    assert (first.share, second.share) == ((2, 0), (2, 1))
    assert first.begun_ids == first.sample_ids == second.sample_ids and not second.begun_ids
    lengths = [tokens - 1 for tokens in first.input_lengths]
    assert all(own % 2 == 0 and n <= 2 * own < n + 4 for own, n in zip(first.positions(GPT), lengths, strict=True))
    assert decode_plan(encode(plan)) == plan
    assert len(encode_entries(plan)) == 4 * plan.pipeline_stages


def test_members_are_shown_as_one_replica() -> None:
    plan = made((2, 1, 1))
    assert "# iteration 3, replicas 0 to 1, one team: predicted" in _text(plan, 0)
    assert _text(plan, 1).startswith("# iteration 3, replicas 0 to 1, one team")
    assert "# iteration 3, replica 2: predicted" in _text(plan, 2)


def _moved(plan: IterationPlan) -> IterationPlan:
    first, *others = plan.replicas[1].micro_batches
    return member(plan, 1, micro_batches=(replace(first, share=(2, 0)), *others))


def _longer(plan: IterationPlan) -> IterationPlan:
    first, *others = plan.replicas[1].micro_batches
    return member(plan, 1, micro_batches=(*others, first))


def _reordered(plan: IterationPlan) -> IterationPlan:
    its = plan.replicas[1].stages
    return member(plan, 1, stages=(its[0], replace(its[1], instructions=its[1].instructions[::-1])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_moved, "replica 1, place 1 in a team of 2: expected its share in every micro-batch, got another in 0"),
        (_longer, "replica 1, place 1 in a team of 2: expected the first member's micro-batches, got others at 0"),
        (_reordered, "replica 1, place 1 in a team of 2: expected the first member's lists, got others on stages 1"),
        (lambda plan: replace(plan, replicas=plan.replicas[2:] + plan.replicas[:1]), "a multiple of its size, got 2"),
        (lambda plan: replace(plan, replicas=plan.replicas[:1]), "at a multiple of its size, got 2 of 1"),
        (lambda plan: replace(plan, in_step=2), "in step"),
    ],
)
def test_members_that_differ_are_refused(change: Callable[[IterationPlan], IterationPlan], message: str) -> None:
    plan = made((2, 1, 1))
    verify(plan)
    with pytest.raises(PlanError, match=message):
        verify(change(plan))


def test_a_micro_batch_of_pieces_has_no_shares() -> None:
    whole = made((1,), layout="packed").replicas[0].micro_batches[0]
    with pytest.raises(PlanError, match="among the ranks that share whole samples, got 2 of 2"):
        replace(whole, share=(2, 2))


@settings(max_examples=examples(60))
@given(
    st.sampled_from([(2,), (2, 2), (4,), (2, 1, 1), (1, 1, 2), (4, 2, 1, 1), (8,)]),
    st.integers(8, 40),
    st.integers(0, 10**6),
    st.sampled_from(["padded", "packed", "mixed"]),
)
def test_plans_of_teams_pass_both_verifiers_and_run(
    sizes: tuple[int, ...], samples: int, seed: int, layout: str
) -> None:
    plan = made(sizes, samples=samples, seed=seed, layout=layout)
    verify(plan, expected_samples=range(100, 100 + samples))
    verify(plan, expected_samples=range(100, 100 + samples), fast_verify=fast_verify)
    for replica in plan.replicas:
        lists = [stage.instructions for stage in replica.stages]
        ToyPipeline(lists, micro_batches=len(replica.micro_batches), seed=seed).run()
