"""How many planner processes a job has, and on which nodes."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_dynapipe.service import PlannerPool
from megatron_dynapipe.store import open_store


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(folder: Path) -> list[int]:
    """Planners that have logged anything; a log is made when its process is started."""
    return sorted(int(log.stem.partition("-")[2]) for log in folder.glob("planner-*.log"))


@pytest.mark.parametrize(
    ("nodes", "first", "most", "at_once"),
    [
        (1, 1, 4, [[0]]),
        (4, 1, 8, [[0], [], [], []]),
        (2, 4, 4, [[0, 2], [1, 3]]),
        (3, 2, 8, [[0], [1], []]),
    ],
)
def test_planners_are_spread_over_nodes(settings, tmp_path, nodes, first, most, at_once) -> None:
    """No more than the job begins with, however many nodes there are."""
    told = settings(most_planners=most)
    with ExitStack() as stack:
        for node in range(nodes):
            folder = tmp_path / str(node)
            folder.mkdir()
            stack.enter_context(PlannerPool(told, node=node, nodes=nodes, first=first, log_folder=folder))
        assert [started(tmp_path / str(node)) for node in range(nodes)] == at_once


def test_another_starts_when_it_is_asked_for_on_the_node_whose_turn_it_is(settings, tmp_path) -> None:
    told = settings(most_planners=3)
    folders = [tmp_path / str(node) for node in range(2)]
    with ExitStack() as stack, open_store(told.store) as store:
        for node, folder in enumerate(folders):
            folder.mkdir()
            stack.enter_context(PlannerPool(told, node=node, nodes=2, first=1, log_folder=folder))
        store.announce(told.keys.planners, 2)
        until(lambda: [started(folder) for folder in folders] == [[0], [1]])
        store.announce(told.keys.planners, 3)
        until(lambda: [started(folder) for folder in folders] == [[0, 2], [1]])
