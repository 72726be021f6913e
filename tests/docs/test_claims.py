"""The page of claims is of the form that its script reads, and a claim that does not hold is missed."""

import re
import runpy

import pytest

from tests.docs.printed import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "claims.py"))


def test_the_page_is_read() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert len(SCRIPT["claims"](page)) == page.count("| `python ")


def test_every_ratio_of_the_readme_is_claimed() -> None:
    rows = [
        line for line in (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").splitlines() if "| `python " in line
    ]
    claimed = {f"{float(number):.2f}" for row in rows for number in re.findall(r"\d+\.\d+", row)}
    ratios = re.findall(r"(\d+\.\d+)\*{0,2} (?:×|times)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert ratios and set(ratios) <= claimed


@pytest.mark.parametrize(
    ("expected", "output", "holds"),
    [
        ("median error 4.2 ± 1.0", "all: median error 5.1%", True),
        ("median error 4.2 ± 1.0", "all: median error 5.3%", False),
        ("right in ≥ 7", "order right in 8 of 8", True),
        ("right in ≥ 7", "order right in 6 of 8", False),
        (r"\| planned \| … \| ≥ 1.15", "| gpt | planned | 3,073 | 3.416 (2.184–5.246) |", True),
        ("right in ≥ 7", "nothing", False),
        (r"gpt:1,1,8 \| … ** 1.19 ± 0.01", "| h100 | gpt:1,1,8 | 2,048 | 8 | 1.2 | **1.193** | 1.150 |", True),
    ],
)
def test_what_is_printed_is_held_against_the_page(expected: str, output: str, holds: bool) -> None:
    (claim,) = SCRIPT["claims"](f"| a sentence | `python -m x` | 1 | `{expected}` | today |")
    assert claim.holds(output)[0] is holds
