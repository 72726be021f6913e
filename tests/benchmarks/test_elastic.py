"""The elasticity campaign: its arithmetic, and one short campaign of real training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.elastic import emergency, nodes
from tests.helpers.random_dataset import make_dataset

ROOT = Path(__file__).parents[2]
LINE = "[2026-11-22 01:00:0{0}.5] iteration {0:8d}/ 100 | consumed samples: {1} | lm loss: {2:.6E} | grad norm: 1\n"


def test_the_second_line_after_a_start_is_a_mean_of_two() -> None:
    rows = [(1, 12, 4.0), (2, 24, 3.5), (3, 36, 2.0)]
    log = "10:00:00 launch: 2 nodes, 2 ranks\n" + "".join(LINE.format(*row) for row in rows)
    found = list(nodes.lines_of(log + log))
    assert [(row.number, row.consumed, row.loss) for row in found] == [(1, 12, 4), (2, 24, 3), (3, 36, 2)] * 2
    assert found[2].ended() - found[0].ended() == 2


def test_a_save_costs_what_the_iterations_after_it_take_more() -> None:
    """Iterations of 10 ms, those after a save 60 ms."""
    at = {0: 0.0}
    for number in range(1, 400):
        at[number] = at[number - 1] + (0.060 if number - 1 in (100, 200, 300) else 0.010)
    found = emergency.cost_of(at, [100, 200, 300], 100, model="gpt", save="sync", size_mb=1)
    assert (found.iteration_ms, found.save_ms) == pytest.approx((10, 50))
    assert found.share == pytest.approx(0.050 / 1.050)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_emergency_checkpoints_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "benchmarks.elastic.emergency", "--models", "gpt", "--ranks", "1", "--every", "4"]
    argv += ["--data", make_dataset(tmp_path / "data"), "--count", "3", "--json", report]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert [row["save"] for row in found] == ["sync", "async"]
    assert all(row["size_mb"] > 0 and row["saves"] > 0 for row in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_nodes_of_which_one_is_lost_and_comes_back(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.elastic.run",
        "--nodes",
        "2",
        "--events",
        "4",
        "--only",
        "kill,join,notice,rank",
    ]
    argv += ["--data", make_dataset(tmp_path / "data"), "--json", report]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    assert [(row["before"], row["after"]) for row in found["rows"]] == [(2, 1), (1, 2), (2, 1), (1, 1)]
    assert found["left"] == 0 and found["distance"] < 1e-4
    assert found["rows"][2]["resumed"] >= found["rows"][2]["last"], "nothing is lost after a notice"
