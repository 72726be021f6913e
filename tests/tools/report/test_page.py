"""The page as a file; tests/tools/report/test_page_in_browser.py looks at it."""

import builtins
import dataclasses
import json
import re

import msgspec
import pytest

from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.core.instructions import BackwardInput, BackwardWeight, Forward
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.report.starts import keep_earlier
from megatron_dynapipe.report.summary import summarise
from megatron_dynapipe.tools.report import charts as module
from megatron_dynapipe.tools.report.charts import MOST_POINTS, run_charts, thinned, timeline_panels
from megatron_dynapipe.tools.report.page import write_page
from megatron_dynapipe.tools.report.run import RecordedTimeline, read_run
from tests.helpers.runs import MS, run_record, write_run


@pytest.fixture
def run(tmp_path):
    return read_run(write_run(tmp_path / "run", iterations=6, stages=3))


def data_of(page) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())[1])


def test_a_page_holds_everything_it_needs(run, tmp_path):
    page = write_page(
        run, summarise(run.iterations, maximum=run.maximum), tmp_path / "made" / "page.html", title="</script>"
    )
    data = data_of(page)
    assert data["title"] == "</script>"
    names = [chart["name"] for chart in data["charts"]]
    assert names == ["loss", "padding", "prediction", "stages", "memory"]
    assert [each["name"] for each in data["timelines"]] == [f"iteration {number}" for number in range(1, 7)]
    text = page.read_text()
    assert "Licensed under the MIT license" in text  # Plotly's, with its code
    assert not re.search(
        r"<(script|link|img)[^>]+(src|href)=", text.replace(re.search(r"<script>.*?</script>", text, re.S)[0], "")
    )
    assert not list(page.parent.glob(".*"))


def test_the_page_says_what_ran_and_where_ranks_came_and_went(tmp_path):
    write_run(tmp_path, iterations=6, stages=4)
    keep_earlier(tmp_path, run_record(stages=1, first=4))
    run = read_run(write_run(tmp_path, stages=1, first=4))
    data = data_of(
        write_page(run, summarise(run.iterations, maximum=run.maximum), tmp_path / "page.html", title="morphed")
    )
    assert data["about"] == [["model", "m"], ["data", "d"], ["earlier start", "from iteration 1, 4 ranks"]]


def test_the_first_iteration_does_not_flatten_the_chart(tmp_path):
    for start_ms, is_cut in ((0, False), (60_000, True)):
        run = read_run(write_run(tmp_path, start_ms=start_ms))
        (chart,) = [each for each in run_charts(run) if each.name == "prediction"]
        assert ("range" in chart.layout["yaxis"]) == ("is cut off" in chart.note) == is_cut
        assert not is_cut or 100 < chart.layout["yaxis"]["range"][1] < 60_000


@pytest.mark.parametrize(("tasks", "lines"), [(3, 4), (20, 1), (77, 1)])
def test_all_tasks_are_a_table_with_the_whole_first(run, tasks, lines):
    losses = {"lm loss": {2: 3.0, 4: 2.0}} | {f"lm loss t{n}": {2: 9.0, 4: n / 10} for n in range(tasks)}
    start = msgspec.structs.replace(run.starts[0], samples={"valid": {f"t{n}": 5 for n in range(tasks)}})
    counted = {"valid": {"lm loss": 12_345, "lm loss t0": 7}}
    evaluated = dataclasses.replace(run, starts=(start,), evaluations={"valid": losses}, tokens=counted)
    (chart,) = [chart for chart in run_charts(evaluated) if chart.table]
    assert len(chart.traces) == lines and len(chart.table) == tasks + 2
    assert chart.table[:3] == [
        ["task", "samples", "tokens", "after iteration 2", "after iteration 4"],
        ["all tasks", f"{5 * tasks:,}", "12,345", "3.0000", "2.0000"],
        [f"t{tasks - 1}", "5", "", "9.0000", f"{(tasks - 1) / 10:.4f}"],
    ]
    assert chart.table[-1][:3] == ["t0", "5", "7"]


def test_a_limit_far_above_is_said_and_does_not_flatten_the_bars(run):
    (start,) = run.starts
    for limit, is_drawn in ((start.memory_limit_bytes, True), (100 * start.memory_limit_bytes, False)):
        changed = msgspec.structs.replace(start, memory_limit_bytes=limit)
        (chart,) = [each for each in run_charts(dataclasses.replace(run, starts=(changed,))) if each.name == "memory"]
        assert any("limit" in trace["name"] for trace in chart.traces) == is_drawn == ("limit" not in chart.note)


def test_lines_are_thinned_out_to_means():
    xs, ys = thinned(range(2_500), [float(value % 2) for value in range(2_500)])
    assert len(xs) == 834 <= MOST_POINTS and xs[:3] == [0, 3, 6]
    assert ys[0] == pytest.approx(1 / 3) and ys[1] == pytest.approx(2 / 3)
    assert thinned([], []) == ([], [])


def test_without_plotly_the_error_says_what_to_install(run, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InstallationError, match="expected Plotly") as caught:
        write_page(run, summarise(run.iterations, maximum=run.maximum), tmp_path / "p.html", title="t")
    assert caught.value.hint == "pip install -e '.[plots]' in the clone of megatron-dynapipe"
    assert not (tmp_path / "p.html").exists()


def test_instructions_are_said_in_full_by_kind(run):
    words = timeline_panels(run.timelines)[-1]["measured"]["kinds"]
    assert "F0" in words["forward"]["text"] and "WAIT_RECV_F0<0" in words["transfer"]["text"]
    halves = enumerate((Forward, BackwardInput, BackwardWeight))
    events = [Event(each(0), at * MS, (at + 1) * MS) for at, each in halves]
    timeline = RecordedTimeline(iteration=0, replica=0, planned=(events,), measured=(events,))
    texts = {kind: boxes["text"] for kind, boxes in timeline_panels([timeline])[0]["planned"]["kinds"].items()}
    assert texts == {"forward": ["F0"], "backward": ["BI0"], "weights": ["BW0"]}


def test_a_page_has_room_for_so_many_timelines_and_boxes(run, tmp_path, monkeypatch):
    large = read_run(write_run(tmp_path, iterations=40, stages=64, micro_batches=8))
    (stages,) = [chart for chart in run_charts(large) if chart.name == "stages"]
    assert len(stages.traces[0]["x"]) == 64
    panels = timeline_panels(large.timelines)
    assert sum(each[side]["boxes"] for each in panels for side in ("planned", "measured")) <= module.MOST_BOXES
    boxes = sum(timeline_panels(run.timelines)[0][side]["boxes"] for side in ("planned", "measured"))
    for most, left in ((3 * boxes, ["iteration 1", "iteration 4", "iteration 6"]), (1, ["iteration 6"])):
        monkeypatch.setattr(module, "MOST_BOXES", most)
        assert [each["name"] for each in timeline_panels(run.timelines)] == left
    monkeypatch.setattr(module, "MOST_DRAWN", 10)  # the shortest are left out and counted
    shown = timeline_panels(run.timelines)[-1]["measured"]
    whole = sum(len(events) for events in run.timelines[-1].measured)
    assert shown["boxes"] == 10 and shown["left_out"] == whole - 10
