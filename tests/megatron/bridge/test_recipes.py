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


def test_rows_of_one_length_packed_ahead_of_time_train_as_plans_do(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    words = ("--device", "cpu", "--small", "--recipes", "sft", "--ways", "planned,slots-64,slots-128")
    run_python("-m", "benchmarks.bridge.training", *words, "--budget-s", "300", "--output", str(output), timeout_s=400)
    runs = json.loads(output.read_text())["runs"]
    for way in ("slots-64", "slots-128"):
        assert runs[f"sft-{way}"]["losses"] == pytest.approx(runs["sft-planned"]["losses"], rel=1e-5)
    assert runs["sft-slots-128"]["micro_batches"] < runs["sft-slots-64"]["micro_batches"] <= 16
