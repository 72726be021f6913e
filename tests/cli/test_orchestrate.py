"""The orchestrate command: both kinds of profile, its table, its report, its errors."""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from tests.modules.test_planning import costs_of
from tests.tools.tuning.test_graph_profile import node

BATCH = ["--micro-batch-size", "2", "--global-batch-size", "16", "--devices", "3"]


def text_profile(folder: Path) -> Path:
    path = folder / "model.txt"
    nodes = [node(1, "first", weights=8), node(2, "second", size="2000000"), node(3, "large", weights=4e9)]
    path.write_text("\n".join([*nodes, "\tnode1 -- node2", "\tnode2 -- node3"]))
    return path


def test_a_text_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--profile", str(text_profile(tmp_path)), "--profile-batch-size", "2", *BATCH]
    given += ["--intra-node-gbps", "80", "--inter-node-gbps", "80", "--inter-node-latency-us", "0"]
    assert main(["orchestrate", *given, "--devices-per-node", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dynapipe-orchestrate/1" and report["profile"] == "model.txt"
    first, last = report["stages"]
    assert len(first["devices"]) == 2 and sorted(first["devices"] + last["devices"]) == [0, 1, 2]
    assert (first["first_layer"], first["end_layer"], last["end_layer"]) == (0, 2, 3)
    assert 0 < report["bound_ms"] <= report["predicted_ms"] and report["speedup"] > 1
    assert report["units"] * report["unit_samples"] == 16
    assert main(["orchestrate", *given, "--devices-per-node", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "layers", "replicas", "samples", "each", "memory,", "MB", "devices"]
    assert lines[1].split()[:2] == ["0", "0-1"] and lines[2].split()[:2] == ["1", "2-2"]
    assert "ms an iteration, predicted" in lines[3] and "times one device" in lines[4]


def test_a_cost_model_of_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    costs_of(1, 1, 1, 3).save(path)
    assert main(["orchestrate", "--profile", str(path), *BATCH, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stages"][-1]["end_layer"] == 4
    for more, said in ((["--profile-batch-size", "2"], "goes with a text prof"), (["--length", "7"], "a length among")):
        assert main(["orchestrate", "--profile", str(path), *BATCH, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "expected --profile-batch-size with a text profile"),
        (["--profile-batch-size", "2", "--length", "8"], "--length goes with a cost model of segments"),
        (["--profile-batch-size", "2", "--device-memory-mb", "1"], "whose stages fit 1,000,000 bytes"),
        (["--profile-batch-size", "2", "--devices", "65"], "expected 1 to 64 devices, got 65"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    assert main(["orchestrate", "--profile", str(text_profile(tmp_path)), *BATCH, *more]) == 2
    assert said in capsys.readouterr().err
