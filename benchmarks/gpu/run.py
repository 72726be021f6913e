"""Everything that is to be checked on a GPU, by one command on a machine with one (or more), in turns of five minutes.

    python benchmarks/gpu/run.py [--part correct|measure|stages|sanitizer] [--output gpu-report.json] [--only PATTERN]
    python benchmarks/gpu/run.py --device cpu --small        # the same code paths without a GPU, for its own test

Checks of what is right run side by side, as the cores allow; what is measured runs alone, after them. README.md beside
this file says what is checked and against which bounds. Prints a line per check, and after each writes a JSON file of
all figures with their provenance; exit status 1 if a check failed.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

from benchmarks.common import ROOT
from benchmarks.gpu.case import Case, Check, Figures, OutOfBoundsError
from benchmarks.gpu.checks import checks, sanitized
from benchmarks.gpu.machine import Budget, NotRunError, ProcessFailedError, Shares, provenance
from benchmarks.gpu.timings import composed, measurements

PARTS: dict[str, Callable[[Case], Iterator[Check]]] = {
    "correct": checks,
    "measure": measurements,
    "stages": composed,
    "sanitizer": sanitized,
}
DEFAULT_PARTS = ("correct", "measure", "stages")
"""Without the sanitizer, which takes minutes and all memory of the device."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check.

    Attributes:
        name: what was checked.
        outcome: passed, failed, or not run.
        figures: what was measured, with the bounds it was held against.
        seconds: it took.
        note: why it failed or was not run.
    """

    name: str
    outcome: str
    figures: Figures
    seconds: float
    note: str = ""


def outcome_of(check: Check, case: Case) -> Outcome:
    """Make one check; whatever it raises, it has failed."""
    began = time.monotonic()

    def outcome(what: str, figures: Figures, note: str = "") -> Outcome:
        return Outcome(check.name, what, figures, round(time.monotonic() - began, 1), note)

    try:
        return outcome("passed", check.make(case))
    except NotRunError as why:
        return outcome("not run", {}, str(why))
    except OutOfBoundsError as error:
        return outcome("failed", error.args[0])
    except ProcessFailedError as failure:
        return outcome("failed", dict(failure.figures), str(failure))
    except Exception:  # noqa: BLE001 - whatever a check raises, the others are made
        return outcome("failed", {}, traceback.format_exc()[-2000:])


def line_of(outcome: Outcome) -> str:
    """What is printed of a check."""
    figures = [f"{name} {v:.3g}" if isinstance(v, float) else f"{name} {v}" for name, v in outcome.figures.items()]
    return f"{outcome.outcome:8} {outcome.name} ({outcome.seconds} s): {', '.join(figures)} {outcome.note}"


def write(output: Path, origin: dict[str, Any], done: Sequence[Outcome]) -> None:
    """Write what is known so far, in place of what was."""
    report = {"format": "dynapipe-gpu-report/1", **origin, "checks": [asdict(outcome) for outcome in done]}
    part = output.with_name(f"{output.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(output)


def side_by_side() -> int:
    """How many checks run at a time, most of which are two processes: a core each, and two for the others."""
    return max(1, len(os.sched_getaffinity(0)) // 2 - 2)


def made(together: Sequence[Check], alone: Sequence[Check], case: Case) -> Iterator[Outcome]:
    """Outcomes as they come: of checks side by side, and after them of those that run one by one."""
    after_s = sum(check.expected_s for check in alone)
    jobs = side_by_side()
    shares = Shares(case.budget, (check.expected_s for check in together), side_by_side=jobs, after_s=after_s)

    def make(check: Check, shares: Shares) -> Outcome:
        return outcome_of(check, replace(case, budget=shares.take(check.expected_s)))

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(make, check, shares) for check in together]):
            yield future.result()
    shares = Shares(case.budget, (check.expected_s for check in alone))
    for check in alone:
        case.idle.end()  # the machine is this check's alone
        yield make(check, shares)


def chosen_checks(case: Case, parts: Sequence[str], pattern: str) -> dict[str, list[Check]]:
    """By part, the checks whose names a regular expression matches."""
    return {
        part: [check for check in checks_of(case) if re.search(pattern, check.name)]
        for part, checks_of in PARTS.items()
        if part in parts
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--part", choices=PARTS, action="append", help=f"(default: {', '.join(DEFAULT_PARTS)})")
    parser.add_argument("--small", action="store_true", help="fewer layouts and steps")
    parser.add_argument("--only", metavar="PATTERN", default="", help="checks whose names a regular expression matches")
    parser.add_argument("--budget-s", type=float, default=570, help="seconds for all checks together (%(default)g)")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.json"), help="the report (%(default)s)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no CUDA device; --device cpu runs the same code paths without one")
    done: list[Outcome] = []
    budget, output = Budget(options.budget_s), options.output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(device=options.device, small=options.small, budget=budget, folder=Path(folder), output=output)
        chosen = chosen_checks(case, options.part or DEFAULT_PARTS, options.only)
        if not any(chosen.values()):
            names = "; ".join(check.name for checks_of in PARTS.values() for check in checks_of(case))
            parser.error(f"expected --only to match one of {names}; got {options.only}")
        together = chosen.pop("correct", [])
        alone = [check for of_part in chosen.values() for check in of_part]
        origin = provenance(options.device)
        try:
            for outcome in made(together, alone, case):
                done.append(outcome)
                print(line_of(outcome), flush=True)
                write(output, origin, done)
        finally:
            case.idle.end()
    print(f"wrote {options.output}; {ROOT.name} at {origin['commit']}", file=sys.stderr)
    sys.exit(any(outcome.outcome == "failed" for outcome in done))


if __name__ == "__main__":
    main()
