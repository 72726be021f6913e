"""The page of a run in a real browser: it renders, zooms, says instructions, and asks the network for nothing.

A script that is put into a copy of the page uses it as a reader would, and writes what it finds into the document.
"""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from megatron_dynapipe.report.summary import summarise
from megatron_dynapipe.tools.report.page import write_page
from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.runs import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path; unpack one and set CHROMIUM to its program"),
]

READER = """<script>
const errors = [], found = {errors};
addEventListener("error", event => errors.push(event.message));
console.error = (...words) => errors.push(words.join(" "));
const until = async what => { while (!what()) await new Promise(resolve => setTimeout(resolve, 50)); };
const colour = () => getComputedStyle(document.body).color;
const mouse = (kind, target, clientX, clientY) =>
  target.dispatchEvent(new MouseEvent(kind, {clientX, clientY, bubbles: true, view: window, buttons: 1}));
addEventListener("load", async () => {
  await until(() => document.documentElement.dataset.ready === "yes");
  found.title = document.title;
  found.charts = [...document.querySelectorAll(".chart")].filter(c => c.querySelector(".point, .js-line")).length;
  const timeline = document.getElementById("timeline"), range = () => timeline._fullLayout.xaxis.range.slice();
  const box = timeline.querySelector(".point path").getBoundingClientRect(), drag = timeline.querySelector(".nsewdrag");
  const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  mouse("mousemove", drag, x, y);
  await until(() => timeline.querySelector(".hovertext"));
  found.hover = timeline.querySelector(".hovertext").textContent;
  const before = range();
  mouse("mousedown", drag, x, y);
  for (let step = 1; step < 9; step++) mouse("mousemove", document, x + 40 * step, y + 2);
  mouse("mouseup", document, x + 320, y + 2);
  await until(() => range()[1] - range()[0] < 0.9 * (before[1] - before[0]));
  const light = colour();
  document.getElementById("theme").click();
  found.themes = light !== colour();
  const chosen = document.getElementById("iteration");
  chosen.value = 0;
  chosen.dispatchEvent(new Event("change"));
  await until(() => range()[1] === before[1]);
  found.asked = performance.getEntriesByType("resource").map(each => each.name);
  document.body.append(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
});
</script>"""


def test_the_page_renders_zooms_and_asks_for_nothing(tmp_path):
    run = read_run(write_run(tmp_path / "run", iterations=8, stages=3))
    summary = summarise(run.iterations, maximum=run.maximum)
    page = write_page(run, summary, tmp_path / "page.html", title="A </script> run")
    page.write_text(page.read_text().replace("<head>", f"<head>{READER}", 1))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--window-size=1400,1200", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    said = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert said is not None, "the page does not do what its reader does"
    found = json.loads(html.unescape(said[1]))
    assert (found["title"], found["charts"], found["themes"]) == ("A </script> run", 6, True)
    assert "stage 0: F0" in found["hover"]
    assert found["errors"] == []
    assert [url for url in found["asked"] if not url.startswith(("file:", "data:", "blob:"))] == []
