"""The page of a run in a real browser: it renders, zooms, says instructions, and asks the network for nothing."""

import pytest

from megatron_dynapipe.report.page import write_page
from megatron_dynapipe.report.run import read_run
from megatron_dynapipe.report.summary import summarise
from tests.helpers.browser import Page, find_browser
from tests.helpers.runs import write_run

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path; unpack one and set CHROMIUM to its program"),
]

BOX = """(() => {
  const path = document.querySelector('#timeline .point path').getBoundingClientRect();
  return [path.left + path.width / 2, path.top + path.height / 2];
})()"""
RANGE = "document.getElementById('timeline')._fullLayout.xaxis.range"


@pytest.fixture
def page_file(tmp_path):
    run = read_run(write_run(tmp_path / "run", iterations=8, stages=3))
    return write_page(
        run, summarise(run.iterations, maximum=run.maximum), tmp_path / "page.html", title="A </script> run"
    )


def test_the_page_renders_zooms_and_asks_for_nothing(page_file):
    assert BROWSER is not None
    with Page(BROWSER, page_file) as page:
        page.wait_for("document.documentElement?.dataset.ready === 'yes'")
        assert page.evaluate("document.title") == "A </script> run"
        charts = page.evaluate(
            "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.point, .js-line')).length"
        )
        assert charts == 6
        x, y = page.evaluate(BOX)
        page.mouse("mouseMoved", x - 1, y)
        page.mouse("mouseMoved", x, y)
        page.wait_for("document.querySelector('#timeline .hovertext') !== null")
        assert "stage 0: F0" in page.evaluate("document.querySelector('#timeline .hovertext').textContent")

        before = page.evaluate(RANGE)
        page.mouse("mousePressed", x, y, is_down=True)
        for step in range(1, 9):
            page.mouse("mouseMoved", x + 40 * step, y + 2, is_down=True)
        page.mouse("mouseReleased", x + 320, y + 2)
        page.wait_for(f"{RANGE}[1] - {RANGE}[0] < {0.9 * (before[1] - before[0])}")

        text = "getComputedStyle(document.body).color"
        light = page.evaluate(text)
        page.evaluate("document.getElementById('theme').click()")
        assert page.evaluate(text) != light
        page.evaluate(
            "(s => { s.value = 0; s.dispatchEvent(new Event('change')); })(document.getElementById('iteration'))"
        )
        page.wait_for(f"{RANGE}[1] === {before[1]}")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
