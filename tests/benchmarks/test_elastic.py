"""The elasticity campaign: its arithmetic, and one short campaign of real training."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.random_dataset import make_dataset

FOLDER = Path(__file__).parents[2] / "benchmarks" / "elastic"


def script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    specification = importlib.util.spec_from_file_location(f"elastic_{name}", FOLDER / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)
    specification.loader.exec_module(module)
    return module


def event(time: float, name: str, **fields: object) -> dict:
    return {"time": time, "who": "rank 0", "event": name, **fields}


START = [
    event(20, "rendezvous", ranks=3),
    event(28, "layout", seconds=2.0),
    event(31, "loaded"),
    event(32, "loaded"),
    event(34, "trains", iteration=9),
    event(35, "trains", iteration=9),
]
CASES = {
    "notice": (
        [event(11, "agreed"), event(12, "agreed"), event(14, "saved"), event(15, "stopped"), event(16, "waits")],
        {"seconds": 24, "detect": 1, "save": 4, "rendezvous": 5},
    ),
    "kill": ([event(13, "ended"), event(13.5, "stopped"), event(14, "waits")], {"detect": 3, "save": 0.5}),
    "join": ([event(12, "waits"), event(13, "agreed"), event(15, "saved")], {"seconds": 22, "detect": 1, "save": 2}),
    "two rounds": (
        [event(11, "agreed"), event(12, "saved"), event(13, "rendezvous", ranks=2), event(18, "stopped")],
        {"detect": 1, "save": 7, "rendezvous": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_seconds_are_divided_among_what_happened(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    seconds = script(monkeypatch, "seconds")
    before, expected = CASES[case]
    parts = seconds.parts_of(before + START, 10)
    assert {name: getattr(parts, name) for name in expected} == pytest.approx(expected)
    assert (parts.start, parts.tune, parts.load, parts.first, parts.resumed) == (6, 2, 4, 2, 9)
    assert parts.seconds == pytest.approx(sum(getattr(parts, name) for name in parts.SECONDS[1:]))


def test_the_second_line_after_a_start_is_a_mean_of_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = script(monkeypatch, "nodes")
    log = tmp_path / "log"
    line = " [2026-11-22 01:00:0{0}.5] iteration {0:8d}/ 100 | consumed samples: {1} | lm loss: {2:.6E} | grad norm: 1"
    rows = [(1, 12, 4.0), (2, 24, 3.5), (3, 36, 2.0)]
    log.write_text("10:00:00 launch: 2 nodes, 2 ranks\n" + "\n".join(line.format(*row) for row in rows) + "\n")
    assert [(row.number, row.consumed, row.loss) for row in nodes.lines_of(log)] == [(1, 12, 4), (2, 24, 3), (3, 36, 2)]


def test_the_cost_of_a_save_is_that_of_its_stretch_over_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 10 ms that slow down by 1 µs each, so that neighbours differ; a save of 20 ms in iteration 201."""
    emergency = script(monkeypatch, "emergency")
    took = {number: 0.010 + 1e-6 * number + (0.020 if number == 201 else 0) for number in range(1, 400)}
    at = {0: 0.0}
    for number, seconds in took.items():
        at[number] = at[number - 1] + seconds
    without = sum(took[number] for number in range(176, 226)) - 0.020
    assert emergency.ratio(at, save=200, every=50) == pytest.approx(1 + 0.020 / without)


def test_the_share_of_saves_is_what_the_iterations_after_them_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 10 ms, those after a save 60 ms; the first save is left out."""
    emergency, at = script(monkeypatch, "emergency"), {0: 0.0}
    for number in range(1, 400):
        at[number] = at[number - 1] + (0.060 if number - 1 in (50, 150, 250, 350) else 0.010)
    assert emergency.share_of(at, [150, 250, 350]) == pytest.approx((50, 0.150 / (249 * 0.010 + 0.150)))


def test_an_interval_is_students(monkeypatch: pytest.MonkeyPatch) -> None:
    emergency = script(monkeypatch, "emergency")
    assert emergency.interval([1.0, 1.02, 1.04]) == pytest.approx((1.02 - 0.04966, 1.02, 1.02 + 0.04966), abs=1e-4)
    low, value, high = emergency.interval([1.01])
    assert value == 1.01 and low != low and high != high


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_emergency_checkpoints_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [sys.executable, FOLDER / "emergency.py", "--models", "gpt", "--ranks", "1", "--every", "4", "--pairs", "2"]
    words += ["--data", make_dataset(tmp_path / "data"), "--seconds", "800", "--json", report]
    done = subprocess.run(words, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert [row["save"] for row in found] == ["sync", "async"]
    assert all(row["size_mb"] > 0 and row["ratio"][0] <= row["ratio"][1] <= row["ratio"][2] for row in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_nodes_of_which_one_is_lost_and_comes_back(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [sys.executable, FOLDER / "run.py", "--nodes", "2", "--events", "4", "--only", "kill,join,notice,rank"]
    words += ["--data", make_dataset(tmp_path / "data"), "--json", report]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert [(row["before"], row["after"]) for row in found["rows"]] == [(2, 1), (1, 2), (2, 1), (1, 1)]
    assert found["left"] == 0 and found["distance"] < 1e-4
    assert found["rows"][2]["resumed"] >= found["rows"][2]["last"], "nothing is lost after a notice"
