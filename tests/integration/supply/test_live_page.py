"""The page that another process writes while a run trains."""

import pytest

from megatron_dynapipe.errors import ExecutionError
from megatron_dynapipe.integration.supply.live_page import LivePage
from tests.helpers.runs import write_run


def test_a_page_is_begun_every_few_iterations_and_finished_at_the_end(tmp_path, monkeypatch):
    begun = []
    page = LivePage(write_run(tmp_path), every=3)
    start = page._start
    monkeypatch.setattr(page, "_start", lambda: begun.append(start()) or begun[-1])
    for iteration in range(3):
        page.after(iteration)
    assert len(begun) == 1
    begun[0].wait(60)
    page.after(3)
    assert len(begun) == 1
    (tmp_path / "report.html").unlink()
    assert page.finish()
    assert len(begun) == 2 and (tmp_path / "report.html").exists()


def test_without_the_flag_nothing_is_written(tmp_path):
    page = LivePage(write_run(tmp_path), every=0)
    page.after(0)
    assert not page.finish()
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ExecutionError, match=r"expected a page of the run in .*, got exit status 2"):
        LivePage(tmp_path, every=1).finish()
