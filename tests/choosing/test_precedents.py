"""Plans that follow those of other batches: as good, verified like any other, and only where batches are alike."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.choosing.precedents import MILLION, precedent_of, precedents_of
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import Precedent
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.sampling import GlobalBatch
from tests.core.planner_cases import batch, batch_of, cost_model
from tests.core.planner_cases import settings as settings_of
from tests.helpers.examples import examples

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
PACKED = {"micro_batch_layouts": (BatchLayout.PACKED,), "pipeline_parallel": 4}


def made(family: ModelFamily, precedents: tuple[Precedent, ...] = (), **changes: object) -> Planner:
    return planner_of(settings_of(family, **{**PACKED, **changes, "precedents": precedents}), cost_model(family))


def followed_rows(lengths: np.ndarray, rows: np.ndarray) -> list[list[int]]:
    """Samples of every row, the longest first, each to the row with the most room: positions [samples], [rows]."""
    parts = 2**30
    room = [int(row) * parts // int(rows.sum()) for row in rows]
    held: list[list[int]] = [[] for _ in rows]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        row = max(range(len(rows)), key=lambda each: (room[each], -each))
        room[row] -= int(lengths[sample]) * parts // int(lengths.sum())
        held[row].append(sample)
    return held


def test_rows_take_the_samples_that_they_have_room_for() -> None:
    """With a single change tried, the plan's rows are the precedent's, filled."""
    plain = made(GPT)
    before, now = (batch(GPT, 60, seed=seed) for seed in (1, 2))
    (found,) = precedents_of(plain, [before])
    rows = np.array([row[1] for row in found[1]])
    expected = followed_rows(plain.samples(now).input_positions, rows)
    easy = (100 * found[0], found[1])
    one = ScheduleSettings(search_evaluations=1)
    plan = made(GPT, (easy,), schedule=one).plan(now, 0)
    held = sorted(sorted(row.input_lengths) for row in plan.replicas[0].micro_batches)
    assert held == sorted(sorted(now.input_lengths[row].tolist()) for row in expected if row)


@given(st.sampled_from((GPT, T5)), st.integers(1, 2), st.sampled_from(("off", "auto", "on")), st.integers(0, 2**16))
@settings(max_examples=examples(10))
def test_a_plan_that_follows_is_as_good(family: ModelFamily, replicas: int, split_backward: str, seed: int) -> None:
    same = {"data_parallel": replicas, "split_backward": split_backward}
    plain = made(family, **same)
    firsts = [batch(family, 80, seed=seed + k) for k in range(3)]
    now = batch(family, 80, seed=seed + 3)
    following = made(family, precedents_of(plain, firsts), **same)
    plan, again, searched = (planner.plan(now, 5) for planner in (following, following, plain))
    assert plan == again, "a pure function"
    assert plan.totals.predicted_ns <= 1.03 * searched.totals.predicted_ns
    assert plan.settings_digest != searched.settings_digest


def test_a_batch_that_does_not_come_as_near_is_searched_as_without_precedents() -> None:
    plain, now = made(GPT), batch(GPT, 80, seed=1)
    ((over_estimate, rows),) = precedents_of(plain, [batch(GPT, 80)])
    plans = [planner.plan(now, 0) for planner in (plain, made(GPT, ((over_estimate * 9 // 10, rows),)))]
    assert plans[0] == msgspec.structs.replace(plans[1], settings_digest=plans[0].settings_digest)


@pytest.mark.parametrize("now", [batch(GPT, 6), batch_of(*[(1000, 0)] * 3, *[(20, 0)] * 5)], ids=["few", "long"])
def test_batches_unlike_all_precedents_are_planned_as_well(now: GlobalBatch) -> None:
    plain = made(GPT)
    times = [
        planner.plan(now, 0).totals.predicted_ns
        for planner in (made(GPT, precedents_of(plain, [batch(GPT, 80)])), plain)
    ]
    assert times[0] <= 1.03 * times[1]


def test_padded_micro_batches_are_not_followed() -> None:
    """By rows, one of 23 plans was 1.3% slower."""
    before = batch(GPT, 80)
    padded = made(GPT, micro_batch_layouts=(BatchLayout.PADDED,))
    assert precedents_of(padded, [before]) == ()
    over_estimate, rows = precedent_of(
        made(GPT, micro_batch_layouts=tuple(BatchLayout)), before, padded.plan(before, 0)
    )
    assert rows == () and over_estimate > 0.5 * MILLION


def test_of_plans_in_pieces_the_time_alone_counts() -> None:
    """What follows others has to come as near to its estimate as these do."""
    of_pieces = made(GPT, slices=128)
    before, now = batch_of((1000, 0), *[(60, 0)] * 30), batch(GPT, 80, seed=1)
    over_estimate, rows = precedent_of(of_pieces, before, of_pieces.plan(before, 0))
    assert rows == () and over_estimate > 0.5 * MILLION
    assert made(GPT, ((over_estimate, ()),)).plan(now, 0).replicas == made(GPT).plan(now, 0).replicas


def test_a_batch_that_cannot_be_planned_gives_none() -> None:
    plain = made(GPT)
    assert precedents_of(plain, [batch_of((2**20 + 1, 0))]) == ()


def test_evaluations_and_one_stage_follow_nothing() -> None:
    now = batch(GPT, 30, seed=4)
    for changes, forward_only in (({}, True), ({"pipeline_parallel": 1}, False)):
        plain = made(GPT, **changes)
        following = made(GPT, precedents_of(plain, [batch(GPT, 30)]), **changes)
        plans = [planner.plan(now, 0, forward_only=forward_only) for planner in (plain, following)]
        assert plans[0].replicas == plans[1].replicas


def test_precedents_of_another_layout_are_followed_by_none() -> None:
    """Rows of more replicas than there are."""
    two, one = made(GPT, data_parallel=2), made(GPT)
    precedents = precedents_of(two, [batch(GPT, 60)])
    now = batch(GPT, 60, seed=1)
    assert made(GPT, precedents).plan(now, 0).replicas == one.plan(now, 0).replicas
    assert replace(one.problem(one.samples(now)), precedents=precedents).native is not None
