"""`report`: a run's folder as a summary and a page."""

import json

import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.report import idle_hint
from megatron_dynapipe.core.instructions import Forward
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.report.starts import keep_earlier
from megatron_dynapipe.report.trace import Panel
from tests.helpers.runs import run_record, write_run


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


@pytest.mark.parametrize(("busy", "said"), [(40, True), (95, False)])
def test_idle_stages_are_said_with_what_shortens_that(busy, said) -> None:
    def stage(number: int) -> tuple[Event, ...]:
        return (Event(Forward(micro_batch=0, chunk=0), 0, busy), Event(Forward(micro_batch=1, chunk=0), 99, 100))

    told = idle_hint([Panel("planned", (stage(0), stage(1)))])
    assert bool(told) is said
    assert idle_hint([Panel("planned", (stage(0),))]) == ""  # one stage waits for no other
    if said:
        assert "the last plan leaves stages idle 59% of the time: --dynapipe-layers-per-stage auto" in told


@pytest.mark.parametrize("name", ["savefig", "write_trace"])
def test_a_run_ends_with_its_summary_where_nothing_can_be_drawn(tmp_path, capsys, monkeypatch, name) -> None:
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    folder = write_run(tmp_path / "run", iterations=6, stages=2)
    owner = "matplotlib.figure.Figure" if name == "savefig" else "megatron_dynapipe.cli.report"
    monkeypatch.setattr(f"{owner}.{name}", fail)
    assert main.main(["report", str(folder), "--end-of-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("warning: the last iteration cannot be drawn: [Errno 28]") and "\n6 iterations, " in said
    assert ("picture: " in said) is (name == "write_trace") and "trace: " not in said


def test_a_run_ends_with_the_summary_of_its_last_start(tmp_path, capsys) -> None:
    folder = write_run(tmp_path / "run", iterations=6, stages=2)
    keep_earlier(folder, run_record(first=3))
    write_run(folder, iterations=3, first=3, stages=2)
    assert main.main(["report", str(folder), "--end-of-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 iterations, ") and "timeline.png" in said and "timeline.trace.json" in said
