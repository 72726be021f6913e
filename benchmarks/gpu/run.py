"""Everything that is to be checked on a GPU, by one command on a machine with one (or more), in ten minutes.

    python benchmarks/gpu/run.py [--output gpu-report.json] [--only PATTERN]
    python benchmarks/gpu/run.py --device cpu --small        # the same code paths without a GPU, for its own test

README.md beside this file says what is checked and against which bounds. Prints a line per check, and after each writes
a JSON file of all figures with their provenance; exit status 1 if a check failed.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

from benchmarks.common import ROOT
from benchmarks.gpu.checks import Case, Figures, OutOfBoundsError, checks
from benchmarks.gpu.machine import Budget, NotRunError, ProcessFailedError, provenance


@dataclass(frozen=True, slots=True)
class Check:
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


def outcome_of(name: str, check: Callable[[], Figures]) -> Check:
    """Make one check; whatever it raises, it has failed."""
    began = time.monotonic()

    def outcome(what: str, figures: Figures, note: str = "") -> Check:
        return Check(name, what, figures, round(time.monotonic() - began, 1), note)

    try:
        return outcome("passed", check())
    except NotRunError as why:
        return outcome("not run", {}, str(why))
    except OutOfBoundsError as error:
        return outcome("failed", error.args[0])
    except ProcessFailedError as failure:
        return outcome("failed", {}, str(failure))
    except Exception:  # noqa: BLE001 - whatever a check raises, the others are made
        return outcome("failed", {}, traceback.format_exc()[-2000:])


def line_of(check: Check) -> str:
    """What is printed of a check."""
    figures = [f"{name} {v:.3g}" if isinstance(v, float) else f"{name} {v}" for name, v in check.figures.items()]
    return f"{check.outcome:8} {check.name} ({check.seconds} s): {', '.join(figures)} {check.note}"


def write(output: Path, origin: dict[str, Any], done: Sequence[Check]) -> None:
    """Write what is known so far, in place of what was."""
    report = {"format": "dynapipe-gpu-report/1", **origin, "checks": [asdict(check) for check in done]}
    part = output.with_name(f"{output.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="fewer layouts and steps")
    parser.add_argument("--only", metavar="PATTERN", default="", help="checks whose names a regular expression matches")
    parser.add_argument("--budget-s", type=float, default=570, help="seconds for all checks together")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no CUDA device; --device cpu runs the same code paths without one")
    done: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        case = Case(device=options.device, small=options.small, budget=Budget(options.budget_s), folder=Path(folder))
        every = list(checks(case))
        selected = [(name, check) for name, check in every if re.search(options.only, name)]
        if not selected:
            parser.error(f"expected --only to match one of {'; '.join(name for name, _ in every)}; got {options.only}")
        origin = provenance(options.device)
        try:
            for name, check in selected:
                done.append(outcome_of(name, check))
                print(line_of(done[-1]), flush=True)
                write(options.output, origin, done)
        finally:
            case.end()
    print(f"wrote {options.output}; {ROOT.name} at {origin['commit']}", file=sys.stderr)
    sys.exit(any(check.outcome == "failed" for check in done))


if __name__ == "__main__":
    main()
