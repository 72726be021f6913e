"""Plans and comparisons for any module: a cost model of segments, evened out over the stages."""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from tests.modules.test_planning import costs_of

BATCHES = {"format": "dynapipe-batches/1", "batches": [{"id": "b0", "input": [9, 33, 30, 60, 12, 8, 50, 17]}]}


def arguments(folder: Path, *more: str) -> list[str]:
    costs, batches = folder / "costs.json", folder / "batches.json"
    costs_of(1, 1, 1, 3).save(costs)
    batches.write_text(json.dumps(BATCHES))
    given = ["--batches", str(batches), "--cost-model", str(costs), "--model", "segments"]
    return [*given, "--device-memory-mb", "500", "--search-evaluations", "20", "--json", *more]


def test_segments_are_compared(tmp_path, capsys):
    assert main(["compare", *arguments(tmp_path, "--pipeline-parallel", "2", "--data-parallel", "2")]) == 0
    (batch,) = json.loads(capsys.readouterr().out)["batches"]
    assert batch["methods"]["dynapipe"]["ms"] <= batch["methods"]["padding"]["ms"]


def test_segments_are_planned(tmp_path, capsys):
    assert main(["plan", *arguments(tmp_path, "--pipeline-parallel", "2")]) == 0
    (iteration,) = json.loads(capsys.readouterr().out)["iterations"]
    assert iteration["error"] is None
    assert len(iteration["replicas"][0]["stages"]) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tensor-parallel", "2"], "expected no tensor parallelism"),
        (["--pipeline-parallel", "5"], "no division of 4 segments into 5 stages"),
    ],
)
def test_what_segments_cannot_be(tmp_path, capsys, more, said):
    assert main(["plan", *arguments(tmp_path, *more)]) == 2
    assert said in capsys.readouterr().err


def test_segments_are_tuned(tmp_path, capsys):
    assert main(["tune", *arguments(tmp_path, "--devices", "2")]) == 0
    report = json.loads(capsys.readouterr().out)
    layouts = [(each["data_parallel"], each["pipeline_parallel"]) for each in report["layouts"]]
    assert report["format"] == "dynapipe-tune/1" and sorted(layouts) == [(1, 2), (2, 1)]
    (stages,) = [each["layers_per_stage"] for each in report["layouts"] if each["pipeline_parallel"] == 2]
    assert stages == [3, 1]
    assert main(["tune", *arguments(tmp_path, "--devices", "2", "--write-config", "x.yaml")]) == 2
    assert "are for runs of Megatron's models" in capsys.readouterr().err
