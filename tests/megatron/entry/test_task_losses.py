"""Losses by task through an entry script: in Megatron's log, in both writers, in the records and their report."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.sampling import LengthTable
from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset
from tests.megatron.hooks.test_metrics import WandB, scalars_in, writers_flags

TASKS = ("a task", "another", "third")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", tasks=TASKS)


def evaluated(*, rank: int, world_size: int, script: str, argv: list[str]) -> dict[str, Any]:
    """On one rank: what the script says, and what it logs to Weights & Biases."""
    sys.modules["wandb"] = wandb = WandB()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = run_script(script, argv)
    return {"status": status, "stdout": output.getvalue(), "logged": wandb.logged}


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("t5", "--pipeline-model-parallel-size 2"),
        pytest.param("gpt", "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("gpt", "", marks=pytest.mark.slow),
    ],
)
def test_losses_by_task_are_logged_drawn_and_reported(
    family: str, flags: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += f" --train-iters 4 --log-interval 2 --eval-interval 2 --full-validation {writers_flags(tmp_path)}"
    arguments = {"script": script_of(family), "argv": words(family, data, flags, report=tmp_path)}
    runs = run_ranks(evaluated, 2, arguments, deadline_s=150)
    assert [run["status"] for run in runs] == [0, 0]
    log, logged_by_wandb, scalars = runs[-1]["stdout"], runs[-1]["logged"], scalars_in(tmp_path / "board")
    names = ["lm loss", *(f"lm loss {task}" for task in TASKS)]
    recorded_run = read_run(tmp_path)
    evaluations = recorded_run.evaluations
    for split in ("valid", "test"):  # of which the first is evaluated twice at the end
        lengths = LengthTable.read(data, split)
        of_gpt = lengths.input.astype(int) + lengths.target - 1
        tokens = of_gpt if family == "gpt" else lengths.target.astype(int) + 1
        assert recorded_run.tokens[split]["lm loss"] == tokens.sum()
    assert {split: sorted(losses) for split, losses in evaluations.items()} == dict.fromkeys(
        ("train", "valid", "test"), names
    )
    logged = dict(re.findall(r"iteration +(\d+) planned:.*\n loss by task \|(.*)", log))
    assert list(logged) == ["2", "4"], "two iterations to a line"
    for at, line in logged.items():
        for task, loss in re.findall(r" ([a-z ]+): (\S+) \|", line):
            assert evaluations["train"][f"lm loss {task}"][int(at)] == pytest.approx(float(loss), rel=1e-5)
            for written in (scalars, logged_by_wandb):
                assert written[at][f"lm loss by task/{task}"] == pytest.approx(float(loss), rel=1e-5)
    for name in names:
        early, late, again, test = (float(each) for each in re.findall(rf"{name} value: (\S+)", log))
        recorded = evaluations["valid"][name]
        assert list(recorded) == [2, 4]
        assert [recorded[2], evaluations["test"][name][4]] == pytest.approx([early, test], rel=1e-4)
        assert [recorded[4], again] == pytest.approx([late, late], rel=1e-4), "of the same samples"
        assert scalars["2"][f"{name} validation"] == pytest.approx(recorded[2], rel=1e-4)
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "valid loss after iteration 4: " in said and "test loss after iteration 4: " in said
    assert all(f"{task} {evaluations['test'][f'lm loss {task}'][4]:.4f}" in said for task in TASKS)
    page = (tmp_path / "report.html").read_text()
    assert "Evaluation: valid" in page and "Training by task" in page and json.dumps("another") in page


@pytest.mark.slow
def test_losses_by_task_do_not_depend_on_the_layout(data: Path, tmp_path: Path) -> None:
    """One checkpoint, evaluated over data-parallel, pipeline and tensor-parallel ranks."""
    common = f"--train-iters 2 --eval-interval 2 --eval-iters 2 --load {tmp_path / 'saved'}"
    found = {}
    for name, flags in (
        ("data", f"--save {tmp_path / 'saved'} --save-interval 2"),
        ("pipeline", "--pipeline-model-parallel-size 2"),
        ("tensor", "--tensor-model-parallel-size 2"),
    ):
        report = tmp_path / name
        arguments = {"script": script_of("gpt"), "argv": words("gpt", data, f"{common} {flags}", report=report)}
        runs = run_ranks(evaluated, 2, arguments, deadline_s=150)
        assert [run["status"] for run in runs] == [0, 0]
        found[name] = {
            task: [float(each) for each in re.findall(rf"lm loss {task} value: (\S+)", runs[-1]["stdout"])][-2:]
            for task in TASKS
        }
    assert all(len(losses) == 2 for losses in found["data"].values())  # of both splits, at the end
    for name in ("pipeline", "tensor"):
        for task in TASKS:
            assert found[name][task] == pytest.approx(found["data"][task], rel=1e-4)
