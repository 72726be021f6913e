"""Figures of a job's planners as scalars for TensorBoard."""

import msgspec
import pytest

from megatron_dynapipe.integration.supply.planner_metrics import planner_metrics
from megatron_dynapipe.service.figures import PlannerFigures
from megatron_dynapipe.store import MemoryStore, PlanKeys

KEYS = PlanKeys(job="job", settings_digest="s")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_planners_are_summed_up(store: MemoryStore) -> None:
    for planner in range(2):
        figures = PlannerFigures(
            planner=planner,
            planned=10,
            planning_ns=50_000_000,
            published_bytes=20_000_000,
            window_iterations=4 + planner,
            taken_over=1,
        )
        store.put_latest(KEYS.figures(planner), msgspec.json.encode(figures))
    found = planner_metrics(store, KEYS, 8)
    assert found["planners"] == 2
    assert found["planning time (ms)"] == pytest.approx(5)
    assert found["plan size (MB)"] == pytest.approx(2)
    assert found["planned ahead (iterations)"] == 5
    assert found["leases taken over"] == 2


def test_without_figures_there_are_no_scalars(store: MemoryStore) -> None:
    assert planner_metrics(store, KEYS, 2) == {}
    store.put_latest(KEYS.figures(0), b"of another version")
    assert planner_metrics(store, KEYS, 2) == {}
    store.close()
    assert planner_metrics(store, KEYS, 2) == {}
