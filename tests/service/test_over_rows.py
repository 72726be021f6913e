"""What plans gain over packed rows on a run's own layout, and how the run is told."""

import logging
import re

import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.service.loop import PlannerLoop
from megatron_dynapipe.service.over_rows import over_rows, told
from megatron_dynapipe.tools.rivals.methods import Longest, predict
from tests.core.planner_cases import batch_of, cost_model
from tests.core.planner_cases import settings as planner_settings
from tests.service.test_loop import FakeSource, only_train
from tests.store.memory_store import MemoryStore


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (1.3, "be 1.30 times as fast as packed rows on this layout: 10 and 13 ms; `megatron-dynapipe tune` compares"),
        (1.01, "gain nothing over packed rows on this layout: 10 and 13 ms; `megatron-dynapipe tune` compares"),
        (0.8, "be slower than packed rows on this layout: 10 and 13 ms. plans choose layers and virtual"),
    ],
)
def test_what_is_said(gain: float, said: str) -> None:
    line = told(gain, "10 and 13 ms", stages=2)
    assert line.removeprefix("plans are predicted to ").startswith(said)
    assert line.endswith("`megatron-dynapipe tune` compares each on its own best layout")
    assert "--dynapipe" not in told(0.8, "10 and 13 ms", stages=1), "there is one layer split for one stage"


def run(**changes: object) -> PlannerSettings:
    return planner_settings(ModelFamily.GPT, hidden_size=64, memory_limit_bytes=10**9, **changes)


def test_it_is_what_compare_predicts() -> None:
    costs = cost_model(ModelFamily.GPT, hidden=64, vocabulary=512, max_size=64, max_length=1024)
    batch = batch_of(*((n, 0) for n in (9, 17, 33, 120, 64, 200, 31, 5)))
    both = run(micro_batch_layouts=tuple(BatchLayout))
    planned, rows = map(float, re.findall(r"([\d.]+) ms", over_rows(planner_of(both, costs), batch)))
    times = {name: predict(name, batch, Longest(200, 0), both, costs).ms for name in ("packed_rows", "verl", "slime")}
    assert rows == pytest.approx(min(times.values()), abs=0.06)
    assert planned == pytest.approx(predict("dynapipe", batch, Longest(200, 0), both, costs).ms, abs=0.06)
    assert not over_rows(planner_of(run(), costs), batch), "rows are not trained where there is no kernel for them"


def test_a_run_is_told_once_by_one_planner(settings, caplog: pytest.LogCaptureFixture) -> None:
    """And goes on where it cannot be said."""

    class Gaining(FakeSource):
        asked = 0

        def over_rows(self) -> str:
            self.asked += 1
            if self.asked > 1:
                raise PlanningError("no plan")
            return "1.30 times as fast"

    caplog.set_level(logging.INFO)
    source = Gaining()
    published = []
    for planner in (0, 0, 1):
        job = only_train(settings(planner=planner, planners=2, look_ahead=100), iterations=7)
        store = MemoryStore()
        PlannerLoop(job, source, store).run()  # type: ignore[arg-type]
        if planner == 0:
            published.append(store.wait_any([job.keys.gain], timeout_s=0.1, what="a gain")[1])
    assert published == [b"1.30 times as fast", b"plans cannot be compared with packed rows: no plan"]
    assert source.asked == 2
    assert sum("1.30 times as fast" in text for text in caplog.messages) == 1
    assert sum("plans cannot be compared with packed rows: no plan" in text for text in caplog.messages) == 1
