"""The page that explains `tune`'s figures: its command's output, and its formulas."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/tuning/figures.md").read_text()
FORMULAS = re.findall(r"^\| (.+) \| `([-+*/(). 0-9e]+)` \| ([0-9.]+) \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("what", "formula", "figure"), FORMULAS, ids=[what[:40] for what, *_ in FORMULAS])
def test_a_formula_comes_to_its_figure(what: str, formula: str, figure: str) -> None:
    decimals = len(figure.partition(".")[2])
    value = eval(formula)  # noqa: S307  (numbers and operators of our own page)
    assert value == pytest.approx(float(figure), abs=0.6 * 10.0**-decimals)


def test_the_command_prints_what_the_page_shows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    block = re.search(r"```console\n\$ (.+)\n([^`]+)```", PAGE)
    assert block is not None and len(FORMULAS) == 20
    assert main(shlex.split(block[1])[1:]) == 0
    shown, printed = block[2].splitlines(), capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed[: len(shown)]] == shown
    figures = dict(zip(("time", "exposed", "tokens", "mfu", "memory"), shown[1].split()[1:6], strict=True))
    hidden, figures["reduction"] = re.search(r"passes hide ([\d.]+) of ([\d.]+) ms", "\n".join(printed)).groups()
    assert float(figures["exposed"]) == pytest.approx(float(figures["reduction"]) - float(hidden), abs=0.06)
    computed = {what: float(figure) for what, _, figure in FORMULAS}
    for name, start in (("reduction", "gradient reduction"), ("memory", "together")):
        of_page = next(figure for what, figure in computed.items() if what.startswith(start))
        assert of_page == pytest.approx(float(figures[name]), rel=2e-3), name
