"""Whole runs of the entry scripts: resume, evaluation, layouts, summary."""

import json
from pathlib import Path

import pytest

from tests.helpers.entry_scripts import train
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random")


@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(family, data, tmp_path):
    flags = "--pipeline-model-parallel-size 2 --eval-iters 1 --eval-interval 4"
    whole = train(family, data, f"{flags} --train-iters 8", ranks=2, report=tmp_path / "whole")
    folder = tmp_path / "checkpoint"
    first = f"{flags} --train-iters 8 --exit-interval 4 --save {folder} --save-interval 4"
    train(family, data, first, ranks=2, report=tmp_path / "first")
    rest = train(family, data, f"{flags} --train-iters 8 --load {folder}", ranks=2, report=tmp_path / "rest")
    expected = whole[-1]["losses"]
    assert list(expected) == [str(i) for i in range(1, 9)]
    assert list(rest[-1]["losses"]) == ["5", "6", "7", "8"]
    for iteration, loss in rest[-1]["losses"].items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    said = "validation loss at iteration"
    assert whole[-1]["stdout"].count(said) == rest[-1]["stdout"].count(said) + 1 > 1


def test_a_run_ends_with_a_summary_and_pictures(data, tmp_path):
    report = tmp_path / "report"
    runs = train("t5", data, "--pipeline-model-parallel-size 2 --train-iters 8", ranks=2, report=report)
    summary = runs[0]["stdout"]
    for said in ("padding efficiency", "micro-batches per iteration", "tokens per second", "waiting for plans"):
        assert said in summary
    assert f"picture: {report / 'timeline.png'}" in summary
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((report / "timeline.trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {"F0", "B0"}
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert titles == ["iteration 8: planned", "iteration 8: measured"]
    losses = list(runs[1]["losses"].values())
    assert losses[-1] < losses[0]


LAYOUTS = {"pipeline 1": (1, 1), "pipeline 1, two replicas": (1, 2), "pipeline 4": (4, 1), "2 × 2": (2, 2)}


@pytest.mark.parametrize("family", ["t5", "gpt"])
@pytest.mark.parametrize(("stages", "replicas"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_entry_scripts_run_data_times_pipeline_layouts(family, stages, replicas, data, tmp_path):
    flags = f"--pipeline-model-parallel-size {stages} --train-iters 2"
    runs = train(family, data, flags, ranks=stages * replicas, report=tmp_path)
    assert list(runs[-1]["losses"]) == ["1", "2"]
