"""Layer splits that suit what passes take better than a run's own, and how the run is told."""

import logging

import msgspec
import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import model_of_layers
from megatron_dynapipe.service.better_split import BETTER, better_split
from megatron_dynapipe.service.corrections import Correction, Percents
from megatron_dynapipe.service.loop import PlannerLoop
from megatron_dynapipe.service.over_rows import ComparedSplits
from tests.core.planner_cases import batch, cost_model
from tests.core.planner_cases import settings as planner_settings
from tests.service.test_loop import FakeSource, only_train
from tests.store.memory_store import MemoryStore

AS_THEY_ARE = (100, 100, 100)


def corrected(percents: Percents, family: ModelFamily, **changes: object) -> Planner:
    layers = {"encoder_layers": 8, "decoder_layers": 8 * family.is_encoder_decoder}
    chosen = planner_settings(family, pipeline_parallel=4, **layers, **changes)
    return planner_of(msgspec.structs.replace(chosen, corrections=percents), cost_model(family))


@pytest.mark.parametrize("family", ModelFamily)
def test_layers_leave_a_rank_whose_passes_take_longer(family: ModelFamily) -> None:
    slow = (AS_THEY_ARE, (190, 190, 190), AS_THEY_ARE, AS_THEY_ARE)
    planner, samples = corrected(slow, family), batch(family, 60)
    found = better_split(planner, samples)
    assert found is not None
    split, gain = found
    assert sum(split) == sum(planner.layout.layers_per_stage) and split[1] < planner.layout.layers_per_stage[1]
    other = planner_of(planner.settings.with_layers_per_stage(split), cost_model(family))
    times = [each.plan(samples, 0).totals.predicted_ns for each in (planner, other)]
    assert gain == times[0] / times[1] >= 1 + BETTER


def test_nothing_is_said_of_a_split_that_is_as_good() -> None:
    """The head is as much work as some layers, so that an equal split would not be."""
    evened = corrected((), ModelFamily.GPT).settings.with_layers_per_stage((3, 2, 2, 1))
    assert better_split(planner_of(evened, cost_model(ModelFamily.GPT)), batch(ModelFamily.GPT, 60)) is None


def test_it_is_said_of_the_run_s_first_batch(settings) -> None:
    """Where a first stage of two layers takes five times as long as costs say, in words that training's flag takes."""
    job = settings(iterations=4)
    planner = msgspec.structs.replace(job.inputs.planner, model=model_of_layers(ModelFamily.T5, 4, 4))
    inputs = msgspec.structs.replace(job.inputs, planner=planner.with_layers_per_stage((4, 4)))
    source = ComparedSplits(inputs)
    slow = Correction(number=1, first_iteration=3, percents=((400, 400, 400), AS_THEY_ARE))
    told = source.better_split("train", slow)
    split, gain = better_split(source.following("train", slow), source._samplers["train"].batch(0)) or ((), 0)
    assert split[0] < 4 and f"to be {gain:.2f} times as fast" in told
    assert f"--dynapipe-layers-per-stage {split[0]},{split[1]} " in told
    fast = Correction(number=2, first_iteration=5, percents=((80, 80, 80), AS_THEY_ARE))  # encoder layers are shorter
    split, _ = better_split(source.following("train", fast), source._samplers["train"].batch(0)) or ((), 0)
    assert split[0] > 4
    assert f"--dynapipe-layers-per-stage {split[0]},{split[1]} " in source.better_split("train", fast)


def test_a_run_is_told_once(settings, caplog: pytest.LogCaptureFixture) -> None:
    """Of the first correction that another split suits better; and goes on where splits cannot be planned."""

    looked: list[int] = []

    class Finding(FakeSource):
        def better_split(self, split: str, correction: Correction) -> str:
            looked.append(correction.number)
            if correction.number == 1:
                raise PlanningError("no plan")
            return "1.20 times as fast" if correction.number == 3 else ""

    caplog.set_level(logging.INFO)
    percents = ((100, 100, 100), (140, 140, 140))
    job = only_train(settings(look_ahead=1), iterations=9)
    store = MemoryStore()
    planner = PlannerLoop(job, Finding(), store)  # type: ignore[arg-type]
    for number in (1, 2, 3, 4):
        correction = Correction(number=number, first_iteration=number, percents=percents)
        store.put_all([(job.keys.correction(number), msgspec.json.encode(correction))])
        store.announce(job.keys.corrections, number)
        store.announce(job.keys.progress("train"), number)
        for _ in range(4):
            planner._step()
    assert looked == [1, 2, 3]
    assert "other layer splits cannot be planned: no plan" in caplog.text
    assert "1.20 times as fast" in store.wait_any([job.keys.gain], timeout_s=0.1, what="a gain")[1].decode()
    assert sum("1.20 times as fast" in text for text in caplog.messages) == 1
