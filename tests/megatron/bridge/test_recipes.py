"""The benchmark of Bridge's own recipes runs to its table, planned and by Bridge's own schedule, with equal losses."""

import json
from pathlib import Path

import pytest

from tests.helpers.bridge_here import MARKS
from tests.helpers.commands import run_python

pytestmark = [*MARKS, pytest.mark.slow]


def test_recipes_train_planned_and_by_bridges_own_schedule(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    words = ("--device", "cpu", "--small", "--recipes", "lora", "--budget-s", "300", "--output", str(output))
    said = run_python("-m", "benchmarks.bridge.training", *words, timeout_s=400).stdout
    runs = json.loads(output.read_text())["runs"]
    planned = runs["lora-planned"]
    assert planned["losses"] == pytest.approx(runs["lora-stock"]["losses"], rel=1e-5)
    assert planned["micro_batches"] < runs["lora-stock"]["micro_batches"]
    assert planned["seconds"]
    assert "| lora | planned |" in said
