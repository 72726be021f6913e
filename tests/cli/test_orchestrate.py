"""The orchestrate command: its table, its report, its errors."""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.segments import SegmentCosts
from tests.modules.test_planning import segment

BATCH = ["--micro-batch-size", "2", "--global-batch-size", "16", "--devices", "3"]


@pytest.fixture
def profile(tmp_path: Path) -> list[str]:
    """Three segments, the last one with so many parameters that it is not replicated."""
    segments = segment("first", 5), segment("second", 5), segment("large", 5, 10**9)
    costs = SegmentCosts(kind="segments", name="toy", source="test", device="cpu", units={}, segments=segments)
    costs.save(tmp_path / "costs.json")
    return ["--profile", str(tmp_path / "costs.json")]


def test_the_report_and_the_table(profile: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*profile, *BATCH, "--devices-per-node", "2", "--intra-node-gbps", "80", "--inter-node-gbps", "80"]
    assert main(["orchestrate", *words, "--inter-node-latency-us", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dynapipe-orchestrate/1" and report["profile"] == "toy"
    first, last = report["stages"]
    assert len(first["devices"]) == 2 and sorted(first["devices"] + last["devices"]) == [0, 1, 2]
    assert (first["first_layer"], first["end_layer"], last["end_layer"]) == (0, 2, 3)
    assert 0 < report["bound_ms"] <= report["predicted_ms"] and report["speedup"] > 1
    assert report["units"] * report["unit_samples"] == 16
    assert main(["orchestrate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "layers", "replicas", "samples", "each", "memory,", "MB", "devices"]
    assert lines[1].split()[:2] == ["0", "0-1"] and lines[2].split()[:2] == ["1", "2-2"]
    assert "ms an iteration, predicted" in lines[3] and "times one device" in lines[4]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--length", "7"], "expected a length among [8, 32, 64], which were measured, got 7"),
        (["--device-memory-mb", "1"], "whose stages fit 1,000,000 bytes"),
        (["--devices", "65"], "expected 1 to 64 devices, got 65"),
        (["--profile", "vgg-19.txt"], "cannot read the cost model vgg-19.txt: No such file or directory"),
    ],
)
def test_what_cannot_be_planned(
    profile: list[str], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["orchestrate", *profile, *BATCH, *more]) == 2
    assert said in capsys.readouterr().err
