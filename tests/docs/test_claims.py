"""The page of claims is of the form that its script reads, and a claim that does not hold is missed."""

import re
import runpy

import pytest

from tests.docs.printed import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "claims.py"))
PAGE = (ROOT / "benchmarks" / "claims.md").read_text(encoding="utf-8")


def test_the_page_is_read() -> None:
    """Every row with a command, whose scripts are there; README's numbers have rows."""
    found = SCRIPT["claims"](PAGE)
    commands = re.findall(r"\| `((?:python|torchrun|megatron-dynapipe) .*?)` \|", PAGE)
    assert {claim.command for claim in found} == set(commands) and len(found) >= len(commands)
    for script in re.findall(r"python (\S+\.py) ", PAGE):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"-m (benchmarks[\w.]+)", PAGE):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_every_ratio_of_the_readme_is_the_least_of_a_claim() -> None:
    """So that a claim which has become smaller is missed, and none is rounded up."""
    least = {f"{claim.value:.2f}" for claim in SCRIPT["claims"](PAGE) if claim.bound == "≥" or claim.tolerance <= 0.011}
    ratios = re.findall(r"(\d+\.\d+)\*{0,2} (?:×|times)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert ratios and set(ratios) <= least


@pytest.mark.parametrize(
    ("expected", "output", "holds"),
    [
        ("median error 4.2 ± 1.0", "all: median error 5.1%", True),
        ("median error 4.2 ± 1.0", "all: median error 5.3%", False),
        ("right in ≥ 7", "order right in 8 of 8", True),
        ("right in ≥ 7", "order right in 6 of 8", False),
        ("p99 ≤ 5", "p50 1.0 ms, p99 4.2 ms", True),
        ("p99 ≤ 5", "p50 1.0 ms, p99 5.2 ms", False),
        (r"\| planned \| … \| ≥ 1.15", "| gpt | planned | 3,073 | 3.416 (2.184–5.246) |", True),
        (r"\| planned \| … \| ≥ 1.15 (≥ 1)", "| gpt | planned | 3,073 | 1.416 (1.01–5.246) |", True),
        (r"\| planned \| … \| ≥ 1.15 (≥ 1)", "| gpt | planned | 3,073 | 1.416 (0.99–5.246) |", False),
        (r"\| planned \| … \| ≥ 1.15 (≥ 1)", "| gpt | planned | 3,073 | 1.416 |", False),
        ("right in ≥ 7", "nothing", False),
        ("a ≥ 1`, `b ≤ 2", "a 1, b 2", True),
        ("a ≥ 1`, `b ≤ 2", "a 1, b 3", False),
        (r"gpt:1,1,8 \| … ** 1.19 ± 0.01", "| h100 | gpt:1,1,8 | 2,048 | 8 | 1.2 | **1.193** | 1.150 |", True),
    ],
)
def test_what_is_printed_is_held_against_the_page(expected: str, output: str, holds: bool) -> None:
    found = SCRIPT["claims"](f"| a sentence | `python -m x` | 1 | `{expected}` | today |")
    assert all(claim.holds(output)[0] for claim in found) is holds


def test_failures_are_missed_and_long_claims_named(monkeypatch, tmp_path, capsys) -> None:
    """Whatever a command that fails has printed; what it says on stderr is told."""
    rows = {
        "ends well": ("print(7)", 1, "exit status 0 ± 0"),
        "says it on stderr": ("import sys; print(7, file=sys.stderr)", 1, " ≥ 7"),
        "fails": ("print('right 8'); raise SystemExit('no data')", 1, "right ≥ 7"),
        "has two": ("print('a 1, b 3')", 1, "a ≥ 1`, `b ≤ 2"),
        "takes long": ("print(8)", 31, " ≥ 7"),
    }
    page = tmp_path / "claims.md"
    page.write_text(
        "\n".join(
            f'| {name} | `python -c "{code}"` | {minutes} | `{text}` | |'
            for name, (code, minutes, text) in rows.items()
        )
    )
    monkeypatch.setattr("sys.argv", ["claims.py"])
    monkeypatch.setitem(SCRIPT["main"].__globals__, "PAGE", page)
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"]()
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "pass  ends well [exit status 0 ± 0]: 0",
        "pass  says it on stderr [ ≥ 7]: 7",
        "MISS  fails [right ≥ 7]: exit status 1: no data",
        "pass  has two [a ≥ 1]: 1",
        "MISS  has two [b ≤ 2]: 3",
        "skip  takes long [ ≥ 7]: 31 minutes, more than --minutes 30",
        "3 pass, 2 MISS, 1 skip",
    ]
