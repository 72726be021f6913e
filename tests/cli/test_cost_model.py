"""`cost-model show`, `diff`, `check`."""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.costing.format import encode_file
from tests.costing.models import gpt_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m.json").write_bytes(encode_file(gpt_file()))
    return tmp_path / "m.json"


def test_check_prints_relative_errors_by_quantity(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost-model", "check", str(path), "--keep", "0.6", "--seed", "1", "--json"]) == 0
    errors = json.loads(capsys.readouterr().out)
    assert set(errors) == {"time_ms", "stored_activation_mb", "peak_activation_mb"}
    assert set(errors["time_ms"]) == {"median", "p90"} and errors["stored_activation_mb"]["p90"] < 0.01
    assert main(["cost-model", "check", str(path)]) == 0
    assert "time: median error" in capsys.readouterr().out
    assert main(["cost-model", "check", str(path), "--keep", "1.5"]) == 2
    assert "between 0 and 1, got 1.5" in capsys.readouterr().err


def test_show_tells_what_a_file_holds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost-model", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "name: small" in out and "tp1_none: 36 times measured, up to 4 samples and 32 positions" in out
    assert main(["cost-model", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"]["tp1_none"]["model_state_mb"] == {"embedding": 4, "encoder": 2}


def test_diff_compares_point_by_point(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.with_name("other.json")
    other.write_bytes(encode_file(gpt_file(scale=1.2)))
    assert main(["cost-model", "diff", str(path), str(other)]) == 0
    assert "tp1_none time_ms encoder.forward: differs by 20.0% (median)" in capsys.readouterr().out
    assert main(["cost-model", "diff", str(path), str(other), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 6 and {row["shared"] for row in rows} == {9}


def test_a_damaged_file_cannot_be_checked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(path.read_text().replace('"tp":1', '"tp":"one"'))
    assert main(["cost-model", "check", str(path)]) == 2
    assert "at `$.keys[...].tp`" in capsys.readouterr().err
