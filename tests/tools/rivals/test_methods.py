"""Methods held against one another: what each pads and packs to, and what a prediction counts."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.cost import A100_RATES, CPU_RATES, AnalyticCostModel
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.repredict import repredicted_ns
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.rivals.methods import METHODS, Longest, method_settings, predict, rows_of_longest
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.planning.planner_cases import batch_of, cost_model, of_lengths, settings


def model(family: ModelFamily) -> tuple[PlannerSettings, AnalyticCostModel]:
    run = settings(family, hidden_size=64, memory_limit_bytes=10**9, micro_batch_layouts=tuple(BatchLayout))
    return run, cost_model(family, hidden=64, vocabulary=512, rates=A100_RATES, max_size=64, max_length=1024)


@pytest.mark.parametrize(
    ("family", "tokens", "longest"),
    [
        (ModelFamily.GPT, (513, 0), (512, 0)),
        (ModelFamily.GPT, (514, 0), (520, 0)),
        (ModelFamily.T5, (512, 62), (512, 64)),
        (ModelFamily.T5, (505, 63), (512, 72)),
    ],
)
def test_longest_positions(family: ModelFamily, tokens: tuple[int, int], longest: tuple[int, int]) -> None:
    assert Longest.of_tokens(family, *tokens) == longest


@pytest.mark.parametrize(
    ("family", "samples", "rows", "row"),
    [
        (ModelFamily.GPT, [(41, 0), (25, 0), (17, 0)], 2, (65, 0)),  # 40 + 24, 16
        (ModelFamily.T5, [(40, 4), (24, 4), (16, 4)], 2, (64, 14)),
        (ModelFamily.T5, [(8, 14), (8, 14), (8, 6), (8, 6)], 3, (64, 14)),  # targets fill the rows
    ],
)
def test_rows_without_masks_are_of_the_longest_length(family, samples, rows, row):
    longest = Longest(64, 0 if family is ModelFamily.GPT else 16)
    packed = rows_of_longest(batch_of(*samples), longest, family)
    found = list(zip(packed.input_lengths.tolist(), packed.target_lengths.tolist(), strict=True))
    assert found == [row] * rows
    assert Longest.of_tokens(family, *row) == longest


@pytest.mark.parametrize("family", list(ModelFamily))
def test_every_method_predicts_the_same_tokens(family: ModelFamily) -> None:
    run, costs = model(family)
    samples = [(n, 0 if family is ModelFamily.GPT else 1 + n // 9) for n in (9, 17, 33, 120, 64, 200, 31, 5)]
    tokens = sum(map(sum, samples))
    longest = Longest.of_tokens(family, 256, 0 if family is ModelFamily.GPT else 64)
    found = {name: predict(name, batch_of(*samples), longest, run, costs) for name in METHODS}
    for each in found.values():
        assert each.tokens_per_second * each.ms / 1e3 == pytest.approx(tokens)
        assert 0 < each.padding_efficiency <= 1 and 1 <= each.shapes <= each.micro_batches
    assert found["padding"].padding_efficiency == pytest.approx(tokens / (len(samples) * sum(longest)))
    assert found["dynapipe"].ms <= min(each.ms for each in found.values()) * 1.001
    assert method_settings("padding", longest, run).micro_batch_layouts == (BatchLayout.PADDED,)
    assert method_settings("packed_rows", longest, run).schedule.method == "1f1b"


LAYOUTS = [(BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)]


def planner(rate: float = 1.0, *, longest: int = 512, **changes: object) -> Planner:
    """For costs of a device so many times as fast."""
    faster = {name: getattr(CPU_RATES, name) * rate for name in ("flops_per_second", "bytes_per_second")}
    rates = msgspec.structs.replace(CPU_RATES, **faster)
    run = settings(ModelFamily.T5, data_parallel=2, tensor_parallel=1, **changes)
    return Planner(run, cost_model(ModelFamily.T5, rates=rates, max_size=64, max_length=longest))


def batch(samples: int = 24) -> GlobalBatch:
    draw = np.random.default_rng(5)
    return of_lengths(draw.integers(2, 300, samples), draw.integers(2, 80, samples), first=100)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_by_its_own_costs_a_plan_takes_what_it_predicts(layouts: tuple[BatchLayout, ...]) -> None:
    own = planner(micro_batch_layouts=layouts)
    plan = own.plan(batch(), 0)
    assert repredicted_ns(plan, batch(), own) == plan.totals.predicted_ns


def test_by_other_costs_it_takes_no_less_than_a_plan_of_theirs_within_the_search() -> None:
    slow, fast = planner(0.1), planner(10)
    plan = fast.plan(batch(), 0)
    found = repredicted_ns(plan, batch(), slow)
    assert found is not None and found > plan.totals.predicted_ns
    assert found >= slow.plan(batch(), 0).totals.predicted_ns * 0.98


def test_costs_that_do_not_reach_so_far_say_nothing() -> None:
    assert repredicted_ns(planner().plan(batch(), 0), batch(), planner(longest=64)) is None
