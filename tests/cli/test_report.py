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


def test_a_summary_for_a_machine(folder, capsys):
    assert main.main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["page"]) == ("dynapipe-report/1", str(folder / "report.html"))
    assert told["summary"]["iterations"] == 6 and 0 < told["summary"]["padding_efficiency"] <= 1
    assert told["plans_alone"] is False and isinstance(told["evaluations"], dict)
    assert main.main(["report", str(folder), "--json", "--quiet"]) == 2


def test_a_comparison_and_another_name(folder, tmp_path, capsys):
    method = {"error": None, "tokens_per_second": 1234.5}
    batches = [{"id": "b", "methods": {"dynapipe": method, "padding": {"error": "no plan"}}}]
    compared = tmp_path / "compared.json"
    compared.write_text(json.dumps({"format": "dynapipe-compare/1", "methods": {}, "batches": batches}))
    page = tmp_path / "new" / "page.html"
    assert main.main(["report", str(folder), "--output", str(page), "--comparison", str(compared), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert '"y":["dynapipe"],"x":[1234.5' in page.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected a comparison, got something else"),
        ("[]", "expected a comparison, got something else"),
        ('{"format": "dynapipe-plan/1"}', "expected the format dynapipe-compare/1, got dynapipe-plan/1"),
        (None, "cannot read the comparison"),
    ],
)
def test_what_is_no_comparison_is_refused(folder, tmp_path, capsys, text, said):
    path = tmp_path / "compared.json"
    if text is not None:
        path.write_text(text)
    assert main.main(["report", str(folder), "--comparison", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_a_page_or_a_run_is_refused(folder, tmp_path, capsys):
    assert main.main(["report", str(folder), "--output", "page.pdf"]) == 2
    assert "expected a page named .html, got --output page.pdf" in capsys.readouterr().err
    assert main.main(["report", str(tmp_path)]) == 2
    assert "--dynapipe-report-dir" in capsys.readouterr().err
