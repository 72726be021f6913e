"""The README's way from a machine to a planned run, on the demos' run files: profile, plan, train. The GPU script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"t5": ["--encoder-layers", "4", "--decoder-layers", "4"], "gpt": ["--layers", "8"]}


def run(*command: str) -> str:
    """Standard output of Python on this checkout."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["t5", "gpt"])
def test_profile_plan_train(model: str, tmp_path: Path) -> None:
    config, data, costs = f"configs/demo_{model}.yaml", str(tmp_path / "data"), str(tmp_path / "costs.json")
    run("-m", "megatron_dynapipe", "data", "demo", "--output", data)
    own = ["--dynapipe-config", config, "--dynapipe-data", data]
    profile = ["profile", "--model", model, "--output", costs, "--budget-minutes", "0.3"]
    assert run("-m", "megatron_dynapipe", *profile, "--", *own).strip() == costs

    batch = {"id": "b", "input": [900, 40, 200, 31, 600, 77], "target": [100, 3, 20, 8, 60, 9]}
    batch = batch if model == "t5" else {"id": "b", "input": batch["input"]}
    batches = tmp_path / "batches.json"
    batches.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [batch]}))
    plan = ["plan", "--batches", str(batches), "--cost-model", costs, "--model", model, *LAYERS[model]]
    plan += ["--hidden-size", "128", "--pipeline-parallel", "2", "--device-memory-mb", "4000", "--json"]
    planned = json.loads(run("-m", "megatron_dynapipe", *plan))["iterations"][0]
    assert planned["error"] is None and planned["predicted_ms"] > 1

    train = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"pretrain_{model}_multitask.py"]
    train += [*own, "--dynapipe-cost-model", costs, "--dynapipe-report-dir", str(tmp_path / "report")]
    log = run(*train, "--train-iters", "3", "--eval-iters", "0", "--lr-warmup-fraction", "0")
    assert log.count("lm loss") >= 2
    assert json.loads(Path(costs).read_text())["name"] in log, "the run says whose costs it plans with"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gpu_script_runs_small_anywhere(tmp_path: Path) -> None:
    run("-m", "benchmarks.cost_accuracy.run", "--output", str(tmp_path), "--size", "small", "--models", "gpt")
    figures = json.loads((tmp_path / "figures.json").read_text())["gpt"]
    assert figures["as profiled"]["iterations"] == 3 and figures["as profiled"]["mean_error"] < 2
    assert abs(figures["memory"]["error_of_both"][0]) < 0.2
    assert {"device", "dtype", "attention", "torch", "date"} <= figures["provenance"].keys()
    assert json.loads((tmp_path / "gpt.json").read_text())["peak_covers_backward"]
