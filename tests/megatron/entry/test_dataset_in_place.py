"""A dataset that is prepared again in its place, under a run: plans are made of what the run began with, or it ends."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.entry_scripts import kill_children, record_losses, run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset


def replaced_in_training(*, rank: int, world_size: int, argv: list[str], data: str, other: str, kill: bool) -> Any:
    """A run whose dataset is replaced at its third iteration; with `kill` its planner dies then, too."""
    from megatron_dynapipe.report import timeline

    def after(iteration: int) -> None:
        if iteration == 3 and rank == 0:
            Path(data).rename(f"{data}-before")
            shutil.copytree(other, data)
            if kill:
                kill_children("megatron_dynapipe.service")

    timeline.draw = lambda panels, path: path
    losses = record_losses(after)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = run_script(script_of("gpt"), argv)
    return {"status": status, "losses": losses, "stdout": output.getvalue(), "stderr": errors.getvalue()}


def run(tmp_path: Path, *, kill: bool) -> list[dict[str, Any]]:
    data = make_dataset(tmp_path / "data", lengths=(20, 60))
    other = make_dataset(tmp_path / "other", lengths=(2, 5), target=3)
    flags = "--train-iters 8 --dynapipe-lookahead 1 --dynapipe-long-samples truncate --pipeline-model-parallel-size 2"
    argv = words("gpt", data, flags, report=tmp_path / "report")
    return run_ranks(
        replaced_in_training, 2, {"argv": argv, "data": str(data), "other": str(other), "kill": kill}, deadline_s=200
    )


def test_a_rank_plans_late_iterations_of_the_dataset_that_the_run_began_with_or_ends(tmp_path: Path) -> None:
    runs = run(tmp_path, kill=True)
    said = runs[0]["stderr"]
    assert [ended["status"] for ended in runs] == [1, 1]
    assert f"expected the dataset {tmp_path / 'data'} that the run began with, found another" in said
    assert "prepare a dataset in a new folder" in said


def test_a_run_whose_planner_lives_goes_on_with_the_dataset_that_it_began_with(tmp_path: Path) -> None:
    runs = run(tmp_path, kill=False)
    assert [ended["status"] for ended in runs] == [0, 0], runs[0]["stderr"][-2000:]
    assert len(runs[-1]["losses"]) == 8
