"""Versions of the cost model: when they come, who makes them, and that a plan can be made again from one's bytes."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape, TableCostModel
from megatron_dynapipe.cost.correct import PassSample
from megatron_dynapipe.errors import CostModelError, InfeasibleError, StoreTimeoutError
from megatron_dynapipe.plan.memory import peak_bytes
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.service.recalibration import Measurements, MemoryBoundPlanner, Recalibrated, Recalibration
from megatron_dynapipe.store import PlanKeys
from megatron_dynapipe.units import ModelFamily, Recompute, Shape
from tests.helpers.memory_store import MemoryStore
from tests.helpers.stage_costs import stage_costs
from tests.planning.planner_cases import of_lengths

KEYS = PlanKeys(job="job", settings_digest="s")
RULE = Recalibration(first_iteration=100, look_ahead=8, ranks=2)
SETTINGS = PlannerSettings(
    family=ModelFamily.GPT, encoder_layers=4, hidden_size=32, pipeline_parallel=2, memory_limit_bytes=10**10,
    recompute=(Recompute.NONE,),
)  # fmt: skip
SHAPE = ModelShape(family=ModelFamily.GPT, hidden=32, heads=4, kv_channels=8, ffn=128, vocabulary=512)
BASE = AnalyticCostModel(SHAPE, CPU_RATES, max_size=16, max_length=256)


def passes(rank: int, slower: float) -> list[PassSample]:
    tables = BASE.tables(tensor_parallel=1, recompute=Recompute.NONE)
    found = []
    for size, length in ((1, 64), (4, 32), (8, 128), (2, 256)):
        costs = stage_costs(tables, SETTINGS.layout, *(np.array([n]) for n in (size, length, 0)))
        found.append(
            PassSample(
                stage=rank,
                shape=Shape(size, length),
                recompute=Recompute.NONE,
                forward_ns=int(costs.forward_ns[0, rank] * slower),
                backward_ns=int(costs.backward_ns[0, rank] * slower),
            )
        )
    return found


def measured(samples: list[PassSample], room: int | None = None) -> bytes:
    return Measurements(passes=tuple(samples), tensor_room_bytes=room).encode()


def recalibrated(store: MemoryStore, deadline_s: float = 30.0) -> Recalibrated:
    return Recalibrated(SETTINGS, BASE, RULE, store, KEYS, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("iteration", "version"),
    [(100, 0), (113, 0), (114, 1), (117, 1), (118, 2), (125, 2), (126, 3), (142, 4), (174, 5), (237, 5), (302, 7)],
)  # fmt: skip
def test_an_iterations_version_follows_from_its_number(iteration: int, version: int) -> None:
    assert RULE.version(iteration) == version


def test_a_version_is_measured_before_it_can_be_needed() -> None:
    assert [RULE.measured_until(version) for version in range(8)] == [100, 104, 108, 116, 132, 164, 228, 292]
    for iteration in range(100, 400):
        assert RULE.measured_until(RULE.version(iteration)) + RULE.look_ahead < iteration or iteration < 114


def test_planners_agree_on_a_version_that_one_of_them_makes() -> None:
    store = MemoryStore()
    for rank in range(2):
        store.put(KEYS.passes(1, rank), measured(passes(rank, slower=3.0)))
    first, second = recalibrated(store), recalibrated(store)
    before, after = first.planner(113), first.planner(114)
    assert before.planner.digest != after.planner.digest == second.planner(114).planner.digest
    _, data = store.wait_any([KEYS.costs(1)], timeout_s=30, what="the version")
    again = Planner(SETTINGS, TableCostModel.decode(data))
    assert again.digest == after.planner.digest  # a plan can be made again from the version's bytes
    old, new = (each.planner.cost_model.tables(tensor_parallel=1, recompute=Recompute.NONE) for each in (before, after))
    assert new.values[0].sum() == pytest.approx(3 * old.values[0].sum(), rel=0.05)


def test_iterations_before_the_first_version_are_planned_again_as_they_were() -> None:
    """Campaign: a store came back empty after version 1; planners waited for passes that nobody sends."""
    store = MemoryStore()
    for rank in range(2):
        store.put(KEYS.passes(1, rank), measured(passes(rank, slower=3.0)))
    planners = recalibrated(store, deadline_s=0.05)
    before, later = planners.planner(113).planner.digest, planners.planner(114).planner.digest
    assert planners.planner(113).planner.digest == before != later
    assert planners.planner(114).planner.digest == later


def test_an_empty_version_is_the_model_itself() -> None:
    store = MemoryStore()
    for rank in range(2):
        store.put(KEYS.passes(1, rank), measured([]))
    tables = recalibrated(store).planner(114).planner.cost_model.tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert (tables.values == BASE.tables(tensor_parallel=1, recompute=Recompute.NONE).values).all()


def test_passes_that_do_not_come_are_named() -> None:
    store = MemoryStore()
    store.put(KEYS.passes(1, 0), measured([]))
    with pytest.raises(StoreTimeoutError, match="the passes that rank 1 measured for version 1 of the cost model"):
        recalibrated(store, deadline_s=0.05).planner(114)


def test_measurements_arrive_as_they_were_sent() -> None:
    found = Measurements(passes=tuple(passes(0, 1.0)), tensor_room_bytes=7)
    assert Measurements.decode(found.encode()) == found


@pytest.mark.parametrize("data", [b'{"stage": 1}', b"\xff\xfe", b'[{"stage": "\xff"}]', b"[" * 100_000, b"", b"null"])
def test_what_are_no_passes_is_one_error(data: bytes) -> None:
    with pytest.raises(CostModelError, match="expected a rank's measured passes"):
        Measurements.decode(data)


@pytest.mark.parametrize(
    ("rooms", "limit"),
    [((None, None), 10**10), ((2 * 10**10, None), 10**10), ((9 * 10**9, 8 * 10**9), 8 * 10**9), ((None, 5), 10**10)],
    ids=["uncounted", "enough", "least", "less than the model"],
)
def test_plans_of_a_version_stay_within_what_tensors_can_have(
    rooms: tuple[int | None, ...], limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    for rank, room in enumerate(rooms):
        store.put(KEYS.passes(1, rank), measured([], room))
    with caplog.at_level("INFO"):
        planner = recalibrated(store).planner(114).planner
    assert planner.settings.memory_limit_bytes == limit
    _, data = store.wait_any([KEYS.costs(1)], timeout_s=30, what="the version")
    least = min((room for room in rooms if room is not None), default=None)
    assert (b"tensor_room_bytes" in data) is (least is not None)
    assert ("plans stay within" in caplog.text) is (least is not None and least < 10**10)


def test_a_batch_without_a_plan_in_the_room_gets_one_beyond_it(caplog: pytest.LogCaptureFixture) -> None:
    batch = of_lengths([250] * 4)
    settings = msgspec.structs.replace(SETTINGS, model_state_bytes=(1000, 1000))
    plan = Planner(settings, BASE).plan(batch, 0)
    narrow = 1000 + (max(peak_bytes(plan, plan.replicas[0], stage) for stage in range(2)) - 1000) // 50
    planner = MemoryBoundPlanner(settings, BASE, narrow)
    assert planner.planner.settings.memory_limit_bytes == narrow
    assert planner.plan(batch, 0) == plan
    assert "no plan within the memory left by fragments" in caplog.text
    with pytest.raises(InfeasibleError):
        MemoryBoundPlanner(msgspec.structs.replace(settings, memory_limit_bytes=narrow), BASE, None).plan(batch, 0)
