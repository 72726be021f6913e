"""`report`: a run's folder as a summary and a page."""

import json

import pytest

from megatron_dynapipe.cli import main
from tests.helpers.runs import write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


def test_a_summary_and_a_page(folder, capsys):
    assert main.main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "6 iterations" in said and f"page: {folder / 'report.html'}" in said
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert main.main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["page"]) == ("dynapipe-report/1", str(folder / "report.html"))
    assert told["summary"]["iterations"] == 6 and 0 < told["summary"]["padding_efficiency"] <= 1
    assert isinstance(told["evaluations"], dict)


def test_what_cannot_be_a_page_or_a_run_is_refused(folder, tmp_path, capsys):
    assert main.main(["report", str(folder), "--output", "page.pdf"]) == 2
    assert "expected a page named .html, got --output page.pdf" in capsys.readouterr().err
    assert main.main(["report", str(tmp_path)]) == 2
    assert "--dynapipe-report-dir" in capsys.readouterr().err
