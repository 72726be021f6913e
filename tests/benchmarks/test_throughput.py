"""The throughput benchmark: its arithmetic, and one short comparison of real training."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_dynapipe.cost import A100_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.helpers.random_dataset import make_dataset

FOLDER = Path(__file__).parents[2] / "benchmarks" / "throughput"


def script(monkeypatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    specification = importlib.util.spec_from_file_location(f"throughput_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_ratios_are_of_sums_and_hold_their_interval(monkeypatch):
    run = script(monkeypatch, "run")
    low, value, high = run.interval([(100, 50), (100, 200), (300, 150)])
    assert value == pytest.approx(500 / 400) and low <= value <= high and low < high
    assert run.interval([(7.0, 7.0)] * 5) == [1, 1, 1]


def test_a_row_leaves_the_warm_up_out(monkeypatch):
    run = script(monkeypatch, "run")
    result = {"ms": 1000, "real_tokens": 50, "positions": 100, "peak_mb": 3, "idle": [0.5, 0.1], "micro_batches": 4}
    warm_up = result | {"ms": 9000, "loss": 8.25, "predicted_ms": 500}
    timed = result | {"loss": 8.0, "predicted_ms": 900}
    row = run.figures("t5", "planned", "1,1,2", [3, 5], [warm_up, timed], [warm_up, timed | {"ms": 500}])
    assert (row["tokens_per_second"], row["ratio_to_planned"], row["padding_efficiency"]) == (50, [0.5] * 3, 0.5)
    assert (row["first_loss"], row["idle"], row["prediction_error"]) == (8.25, 0.3, pytest.approx(0.1))
    assert "| t5 | planned | 50 | 0.500 (0.500–0.500) | 50.0% | 30% | 3 | 8.250000 |" in run.table([row])


@pytest.mark.parametrize(("tokens", "kept"), [(7, ("abcd", "xyz")), (6, ("abcd", "xy")), (3, ("ab", "x"))])
def test_a_long_sample_is_truncated_as_a_whole(monkeypatch, tokens, kept):
    assert script(monkeypatch, "worker").joined("abcd", "xyz", tokens) == kept


def test_every_method_plans(monkeypatch):
    """With its own settings over those of a run; ablations too."""
    methods = script(monkeypatch, "methods")
    shape = ModelShape(family=ModelFamily.T5, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=512)
    costs = AnalyticCostModel(shape, A100_RATES, max_size=64, max_length=1024)
    run = PlannerSettings(
        family=ModelFamily.T5,
        encoder_layers=4,
        decoder_layers=4,
        hidden_size=64,
        pipeline_parallel=2,
        memory_limit_bytes=10**9,
        micro_batch_layouts=tuple(BatchLayout),
    )
    lengths = np.array([9, 200, 30, 77, 120, 31], np.int32)
    batch = GlobalBatch(iteration=0, sample_ids=np.arange(6), input_lengths=lengths, target_lengths=lengths // 4 + 1)
    for method in (methods.METHODS | methods.ABLATIONS).values():
        totals = Planner(method.planner(run, (256, 64)), costs).plan(batch, 0).totals
        assert totals.samples == 6 and method.says


@pytest.mark.slow
def test_methods_train_the_same_function(tmp_path):
    """Four methods on one batch: equal first losses, and the form of the report."""
    data = make_dataset(tmp_path / "data")
    command = [sys.executable, FOLDER / "run.py", "--quick", "--model", "t5", "--batches", "1", "--rounds", "1"]
    command += ["--data", data, "--json", tmp_path / "report.json"]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["format"] == "dynapipe-throughput/1"
    losses = [row["first_loss"] for row in report["rows"]]
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, rel=1e-5)
