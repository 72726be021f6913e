"""What planners report of themselves, as lines and as OpenMetrics text."""

import re

import msgspec
import pytest

from megatron_dynapipe.service.figures import PlannerFigures, decode_figures, open_metrics

FIGURES = PlannerFigures(
    planner=1, planned=4, planning_ns=10_000_000, published_bytes=5000, window_iterations=3, taken_over=2
)


def test_a_line_says_what_a_planner_does() -> None:
    assert FIGURES.as_line().startswith(
        "4 iterations planned, 2.5 ms each, 5,000 bytes; 3 iterations ahead (0 bytes); 2 taken over, 0 leases lost"
    )
    assert PlannerFigures(planner=0).as_line().startswith("0 iterations planned, 0.0 ms each")


def test_figures_are_read_as_they_were_written() -> None:
    assert decode_figures(msgspec.json.encode(FIGURES)) == FIGURES


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b'{"planner": 0, "of_a_later_version": 1}'])
def test_what_is_none_is_passed_over(data: bytes) -> None:
    assert decode_figures(data) is None


def test_metrics_are_text_that_a_scraper_reads() -> None:
    text = open_metrics([("job-a", FIGURES), ("job-b", PlannerFigures(planner=0))])
    assert text.endswith("# EOF\n") and text.count("# EOF") == 1
    assert 'dynapipe_planner_iterations_total{job="job-a",planner="1"} 4\n' in text
    assert 'dynapipe_planner_planning_seconds_total{job="job-a",planner="1"} 0.01\n' in text
    assert 'dynapipe_planner_window_iterations{job="job-b",planner="0"} 0\n' in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (TYPE|HELP|UNIT) \S+ .+|# EOF|\w+\{job="[\w.-]+",planner="\d+"\} [\d.e+-]+', line)
    assert open_metrics([]).endswith("# EOF\n")
