"""The throughput benchmark: its arithmetic, and one short comparison of real training."""

import importlib.util
import itertools
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
    report = script(monkeypatch, "report")
    low, value, high = report.interval([(100, 50), (100, 200), (300, 150)])
    assert value == pytest.approx(500 / 400) and low <= value <= high and low < high
    assert report.interval([(7.0, 7.0)] * 5) == [1, 1, 1]


RESULT = {"ms": 1000, "real_tokens": 50, "positions": 100, "peak_mb": 3, "idle": [0.5, 0.1], "micro_batches": 4}
WARM_UP = RESULT | {"ms": 9000, "loss": 8.25, "predicted_ms": 500}
TIMED = RESULT | {"loss": 8.0, "predicted_ms": 900}


def test_a_row_leaves_the_warm_up_out(monkeypatch):
    report = script(monkeypatch, "report")
    planned = {0: WARM_UP, 1: TIMED | {"ms": 500}}
    row = report.figures("t5", "planned", "1,1,2", [3, 5], {0: WARM_UP, 1: TIMED}, planned)
    assert (row["tokens_per_second"], row["ratio"], row["padding_efficiency"]) == (50, [0.5] * 3, 0.5)
    assert (row["first_loss"], row["idle"], row["prediction_error"]) == (8.25, 0.3, pytest.approx(0.1))
    assert "| t5 | planned | 50 | 0.500 (0.500–0.500) | 50.0% | 30% | 3 | 8.250000 |" in report.table([row])


def test_a_method_is_held_against_the_planned_runs_of_its_own_turns_and_tokens(monkeypatch):
    report = script(monkeypatch, "report")
    planned = {0: WARM_UP, 1: TIMED, 2: TIMED | {"ms": 77}}
    own = {0: WARM_UP, 1: TIMED | {"ms": 2000, "real_tokens": 25, "idle": [], "predicted_ms": None}}
    row = report.figures("gpt", "stock", "1,1,2", None, own, planned)
    assert row["ratio"] == [0.25] * 3 and row["tokens_per_second"] == 12.5
    assert row["idle"] is None and row["prediction_error"] is None
    assert "| – |" in report.table([row])


def test_methods_of_one_function_must_have_one_first_loss(monkeypatch):
    report = script(monkeypatch, "report")
    losses = {"planned": 8.0, "packed_rows": 8.00001, "packing": 9.0, "stock": 1.0}
    report.check_losses([{"method": name, "first_loss": loss} for name, loss in losses.items()])
    with pytest.raises(SystemExit, match="expected the same first loss"):
        report.check_losses([{"method": name, "first_loss": loss} for name, loss in {**losses, "uniform": 8.1}.items()])


def test_a_demo_ends_in_a_sentence(monkeypatch):
    speeds = {"planned": 6000.0, "packed_rows": 4000.0, "padding": 500.0}
    rows = [{"method": name, "tokens_per_second": speed} for name, speed in speeds.items()]
    said = script(monkeypatch, "report").sentence(rows)
    assert "padded 500, packed into rows 4,000, planned 6,000 (12.00 × padding and 1.50 × packed_rows)" in said


def test_slow_methods_train_fewer_batches(monkeypatch):
    run = script(monkeypatch, "run")

    class Job:
        def __init__(self, ms):
            self.ms, self.batches = ms, []

        def ask(self, command):
            self.batches.append(command["batch"])
            return {"ms": self.ms}

    jobs = {"planned": Job(10), "padding": Job(100)}
    results = run.take_turns(jobs, batches=4, rounds=2)
    assert jobs["planned"].batches == [0, *range(4), *range(4)]
    assert sorted(results["padding"]) == [0, 1, 6, 7] and jobs["padding"].batches == [0, 0, 1, 2]


@pytest.mark.parametrize(("tokens", "kept"), [(7, ("abcd", "xyz")), (6, ("abcd", "xy")), (3, ("ab", "x"))])
def test_a_long_sample_is_truncated_as_a_whole(monkeypatch, tokens, kept):
    assert script(monkeypatch, "rows").joined("abcd", "xyz", tokens) == kept


def test_rows_of_2023_hold_every_token_once_within_both_limits(monkeypatch):
    rows = script(monkeypatch, "rows")
    draw = np.random.default_rng(3)
    samples = [(draw.integers(9, 99, n), draw.integers(9, 99, m)) for n, m in draw.integers(1, 30, (40, 2))]
    found = rows.rows_of_2023(samples, (64, 40))
    assert all(len(given) <= 64 and len(wanted) <= 40 for given, wanted in found) and len(found) < 30
    for which in (0, 1):
        held, wanted = (np.sort(np.concatenate([pair[which] for pair in pairs])) for pairs in (found, samples))
        assert held.tolist() == wanted.tolist()
    whole = rows.rows_of_2023(samples, (65, 0))
    assert all(len(given) == 1 and len(given) + len(wanted) <= 65 for given, wanted in whole)
    assert sum(len(wanted) + 1 for _, wanted in whole) == sum(map(len, itertools.chain(*samples)))


def test_equal_rows_cut_the_tokens_as_they_come(monkeypatch):
    rows = script(monkeypatch, "rows")
    samples = [([1, 2, 3], [4]), ([5], [6, 7, 8])]
    assert rows.equal_rows(samples, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows.equal_rows(samples, 10).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2]]  # too few tokens: from the front


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
