"""Runs the commands of docs/claims.md and holds what they print against the page: pass or miss for each claim.

    python scripts/claims.py [--minutes 30] [--only TEXT]

A row of the page has a sentence, a command, its minutes, and what the command prints: text with a number at its end,
`±` a tolerance or `≥` the least. `…` in the text stands for anything on the line. Exit status 1 if a claim is missed.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "claims.md"
_NUMBER = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"
_EXPECTED = re.compile(rf"(.*?)(≥ )?{_NUMBER}(?: ± {_NUMBER})?", re.DOTALL)


class Claim(NamedTuple):
    """A row of the page; `least` in place of a tolerance where the number may be larger."""

    sentence: str
    command: str
    minutes: float
    printed: str
    value: float
    tolerance: float
    least: bool

    def holds(self, output: str) -> tuple[bool, str]:
        """Whether the output has the number, and what it has."""
        pattern = ".*?".join(re.escape(part.strip()) for part in self.printed.split("…"))
        found = re.search(rf"{pattern}\s*{_NUMBER}", output)
        if found is None:
            return False, f"nothing like {self.printed!r}"
        value = _number(found[1])
        return value >= self.value if self.least else abs(value - self.value) <= self.tolerance + 1e-9, found[1]


def claims(page: str) -> list[Claim]:
    """The rows of the page's tables that have a command; raises ValueError for one that is not of the form."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip().replace("\\|", "|").strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 4 or not re.fullmatch(_NUMBER, cells[2]):
            continue
        expected = _EXPECTED.fullmatch(cells[3])
        if expected is None or not (expected[2] or expected[4]):
            raise ValueError(f"expected text, then a number with ± or ≥, got {cells[3]!r}")
        printed, least, value, tolerance = expected.groups()
        rows.append(
            Claim(
                cells[0], cells[1], _number(cells[2]), printed, _number(value), _number(tolerance or "0"), bool(least)
            )
        )
    return rows


def main() -> None:
    """Run the claims that take no longer than asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="longest claims (%(default)s)")
    parser.add_argument("--only", default="", help="those whose sentence or command holds this text")
    args = parser.parse_args()
    outputs: dict[str, str] = {}
    missed = 0
    for claim in claims(PAGE.read_text(encoding="utf-8")):
        if claim.minutes > args.minutes or args.only not in claim.sentence + claim.command:
            continue
        if claim.command not in outputs:
            words = [sys.executable, *shlex.split(claim.command)[1:]]
            outputs[claim.command] = subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT).stdout
        holds, value = claim.holds(outputs[claim.command])
        missed += not holds
        print(f"{'pass' if holds else 'MISS'}  {claim.sentence}: {value}", flush=True)
    sys.exit(missed > 0)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    main()
