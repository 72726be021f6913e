"""What plans gain over packed rows on a run's own layout, and how the run is told."""

import logging

import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.service.loop import PlannerLoop
from megatron_dynapipe.service.over_rows import OverRows, over_rows
from megatron_dynapipe.tools.rivals.methods import Longest, predict
from tests.core.planner_cases import batch_of, cost_model
from tests.core.planner_cases import settings as planner_settings
from tests.service.test_loop import FakeSource, only_train
from tests.store.memory_store import MemoryStore


@pytest.mark.parametrize(
    ("rows_ms", "said"),
    [
        (
            130.0,
            "plans are predicted to be 1.30 times as fast as packed rows on this layout: 100.0 ms, verl's 130.0 ms",
        ),
        (101.0, "plans are predicted to gain nothing over packed rows on this layout: 100.0 ms, verl's 101.0 ms"),
        (
            80.0,
            "plans are predicted to be slower than packed rows on this layout: 100.0 ms, verl's 80.0 ms. --dynapipe",
        ),
    ],
)
def test_what_is_said(rows_ms: float, said: str) -> None:
    line = str(OverRows(plan_ms=100.0, rows_ms=rows_ms, rows="verl's", stages=2))
    assert (
        line.startswith(f"plans are predicted to {said}")
        and "`megatron-dynapipe tune` compares each on its own best layout" in line
    )
    alone = str(OverRows(plan_ms=100.0, rows_ms=80.0, rows="verl's", stages=1))
    assert "--dynapipe" not in alone, "there is one layer split for one stage"


def run(**changes: object) -> PlannerSettings:
    return planner_settings(ModelFamily.GPT, hidden_size=64, memory_limit_bytes=10**9, pipeline_parallel=2, **changes)


def test_it_is_what_compare_predicts() -> None:
    costs = cost_model(ModelFamily.GPT, hidden=64, vocabulary=512, max_size=64, max_length=1024)
    batch = batch_of(*((n, 0) for n in (9, 17, 33, 120, 64, 200, 31, 5)))
    both = run(micro_batch_layouts=tuple(BatchLayout))
    found = over_rows(planner_of(both, costs), batch)
    assert found is not None and found.stages == 2
    times = {name: predict(name, batch, Longest(200, 0), both, costs).ms for name in ("packed_rows", "verl", "slime")}
    assert found.rows_ms == pytest.approx(min(times.values()))
    assert found.plan_ms == pytest.approx(predict("dynapipe", batch, Longest(200, 0), both, costs).ms)
    assert over_rows(planner_of(run(), costs), batch) is None, "rows are not trained where there is no kernel for them"


def test_a_run_is_told_once_by_one_planner(settings, caplog: pytest.LogCaptureFixture) -> None:
    """And goes on where it cannot be said."""

    class Gaining(FakeSource):
        asked = 0

        def over_rows(self) -> OverRows:  # type: ignore[override]
            self.asked += 1
            if self.asked > 1:
                raise PlanningError("no plan")
            return OverRows(plan_ms=100.0, rows_ms=130.0, rows="verl's", stages=2)

    caplog.set_level(logging.INFO)
    source = Gaining()
    for planner in (0, 0, 1):
        job = only_train(settings(planner=planner, planners=2, look_ahead=100), iterations=7)
        PlannerLoop(job, source, MemoryStore()).run()  # type: ignore[arg-type]
    assert source.asked == 2
    assert sum("1.30 times as fast" in text for text in caplog.messages) == 1
    assert sum("plans cannot be compared with packed rows: no plan" in text for text in caplog.messages) == 1
