"""The benchmarks' scripts run, real training at small size (those for GPUs: `test_gpu.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.start.run import stock_flags
from tests.helpers.commands import run_python
from tests.helpers.random_dataset import make_dataset


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accuracy_of_costs(tmp_path):
    words = ("--output", tmp_path, "--size", "small", "--models", "gpt")
    run_python("-m", "benchmarks.cost_accuracy.run", *words, timeout_s=400)
    figures = read(tmp_path / "figures.json")["gpt"]
    assert figures["as profiled"]["iterations"] == 3 and figures["as profiled"]["mean_error"] < 2
    assert abs(figures["memory"]["error_of_both"][0]) < 0.2
    assert {"device", "dtype", "attention", "torch", "date"} <= figures["provenance"].keys()
    assert read(tmp_path / "gpt.json")["peak_covers_backward"]


def test_megatrons_own_start_has_the_flags_of_the_run_file_and_none_of_ours():
    flags = stock_flags("configs/demo_gpt.yaml", ["--train-iters", "1"])
    assert not [flag for flag in flags if "dynapipe" in flag]
    assert {"--num-layers=8", "--transformer-impl=local"} < set(flags)
    assert flags[flags.index("--global-batch-size") + 1] == "4" and "--global-batch-size=80" not in flags


@pytest.mark.slow
def test_starts_are_compared():
    said = run_python("benchmarks/start/run.py", "--rounds", "1", "--ranks", "1", timeout_s=280).stdout
    rows = {
        cells[0]: cells for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines())
    }
    for name in ("planned", "Megatron's own"):
        assert float(rows[name][1]) > 1 and float(rows[name][3]) > 1
    assert "first iteration" in rows["planned"][4]


@pytest.mark.slow
def test_methods_train_the_same_function(tmp_path):
    """Four methods on one batch: equal first losses, and the form of the report."""
    words = ("--quick", "--model", "t5", "--batches", "1", "--rounds", "1", "--json", tmp_path / "report.json")
    run_python("benchmarks/throughput/run.py", *words, "--data", make_dataset(tmp_path / "data"), timeout_s=280)
    report = read(tmp_path / "report.json")
    assert report["format"] == "dynapipe-throughput/1"
    losses = [row["first_loss"] for row in report["rows"]]
    assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert all(0 < row["optimizer_share"] < 1 for row in report["rows"])


def test_agreements_of_all_ranks_are_timed():
    words = ("--processes", "3", "--rounds", "2", "--played", "130")
    said = run_python("-m", "benchmarks.service.agreement", *words, timeout_s=240).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]]
    of_one, of_groups, of_played = rows
    assert [of_one[:2], of_groups[:2]] == [["one group", "3"], ["groups of 64", "3"]]
    assert of_played[1] == "130, 66 played" and 65 <= int(of_played[2]) < 90


def test_the_choice_is_held_against_the_published_best_layout():
    said = run_python("-m", "benchmarks.tuning.run", "published", "--models", "gpt", "--lengths", "512").stdout
    row = [cell.strip() for cell in said.splitlines()[-1].strip("|").split("|")]
    assert row[:2] == ["GPT, 32 layers", "512"] and row[4] == "2·1·4"
    assert float(row[3]) / float(row[5]) < 0.95  # faster than the published best
    assert row[7] == row[4] and row[8] == "0.0%"
