"""Runs the commands of benchmarks/claims.md and holds what they print against the page: pass or miss for each claim.

    python scripts/claims.py [--minutes 30] [--only TEXT]

A row of the page's tables has a sentence, a command (several behind one another with `&&`), its minutes, and what the
command prints, each a claim: text with a number at its end, `±` a tolerance or `≥`, `≤` the least or most. `…` in the
text stands for anything on the line; `(≥ 1)` behind the number is the least of the interval's low end, which is printed
behind it as `1.2 (1.1–1.3)`. `exit status 0 ± 0` asks only that the command ends well, which all have to. Claims that
take longer than --minutes are named as skipped. Exit status 1 if a claim is missed.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "claims.md"
_NUMBER = r"(-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)"
_EXPECTED = re.compile(rf"(.*?)([≥≤] )?{_NUMBER}(?: ± {_NUMBER})?(?: \(≥ {_NUMBER}\))?", re.DOTALL)
_STARTS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "megatron-dynapipe": [sys.executable, "-m", "megatron_dynapipe"],
}
_LONGER = 10
"""Times its minutes, and as many minutes, after which a command is given up."""


class Claim(NamedTuple):
    """A row of the page.

    Attributes:
        text: of what is printed, whole.
        bound: "≥" or "≤" in place of a tolerance, where the number may be larger or smaller.
        low: the least of the interval's low end; None where no interval is asked for.
    """

    sentence: str
    command: str
    minutes: float
    text: str
    printed: str
    value: float
    tolerance: float
    bound: str
    low: float | None

    def holds(self, output: str) -> tuple[bool, str]:
        """Whether the output has the number, and what it has."""
        pattern = ".*?".join(re.escape(part.strip()) for part in self.printed.split("…"))
        found = re.search(rf"{pattern}\s*{_NUMBER}" + (rf" \({_NUMBER}–" if self.low is not None else ""), output)
        if found is None:
            return False, f"nothing like {self.printed!r}"
        value = _number(found[1])
        within = {"≥": value >= self.value, "≤": value <= self.value}
        good = within.get(self.bound, abs(value - self.value) <= self.tolerance + 1e-9)
        if self.low is None:
            return good, found[1]
        return good and _number(found[2]) >= self.low, f"{found[1]}, from {found[2]}"


def claims(page: str) -> list[Claim]:
    """The rows of the page's tables that have a command; raises ValueError for one that is not of the form."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) < 4 or not re.fullmatch(_NUMBER, cells[2]):
            continue
        for text in re.findall(r"`([^`]+)`", cells[3]) or [cells[3]]:
            expected = _EXPECTED.fullmatch(text)
            if expected is None or not (expected[2] or expected[4]):
                raise ValueError(f"expected text, then a number with ±, ≥ or ≤, got {text!r}")
            printed, bound, value, tolerance, low = expected.groups()
            numbers = (_number(value), _number(tolerance or "0"), (bound or "").strip(), _number(low) if low else None)
            rows.append(Claim(cells[0], cells[1].strip("`"), _number(cells[2]), text, printed, *numbers))
    return rows


def output_of(command: str, minutes: float) -> tuple[str, str]:
    """What a command prints, on both streams, and why it failed; empty if it did not."""
    printed = ""
    for one in command.split(" && "):
        name, *words = shlex.split(one)
        try:
            done = subprocess.run(
                [*_STARTS[name], *words],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                timeout=60 * _LONGER * (minutes + 1),
            )
        except subprocess.TimeoutExpired as error:
            return "", f"not done after {error.timeout:.0f} s"
        printed += f"{done.stdout}\nexit status {done.returncode}\n"
        if done.returncode:
            last = (done.stdout.strip().splitlines() or [""])[-1]
            return printed, f"exit status {done.returncode}: {last}"
    return printed, ""


def main() -> None:
    """Run the claims that take no longer than asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="longest claims (%(default)s)")
    parser.add_argument("--only", default="", help="those whose sentence or command holds this text")
    args = parser.parse_args()
    outputs: dict[str, tuple[str, str]] = {}
    counts = {"pass": 0, "MISS": 0, "skip": 0}
    for claim in claims(PAGE.read_text(encoding="utf-8")):
        if args.only not in claim.sentence + claim.command:
            continue
        if claim.minutes > args.minutes:
            outcome, said = "skip", f"{claim.minutes:g} minutes, more than --minutes {args.minutes:g}"
        else:
            if claim.command not in outputs:
                outputs[claim.command] = output_of(claim.command, claim.minutes)
            printed, failure = outputs[claim.command]
            holds, said = (False, failure) if failure else claim.holds(printed)
            outcome = "pass" if holds else "MISS"
        counts[outcome] += 1
        print(f"{outcome}  {claim.sentence} [{claim.text}]: {said}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    sys.exit(counts["MISS"] > 0)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    main()
