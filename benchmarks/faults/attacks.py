"""Attacks on a run, its data, its store and its files: what the user sees, how soon, and what training makes of it.

    python benchmarks/faults/attacks.py --data .demo/data [--only NAME …] [--list]

Prints a table in Markdown: attack, what the user sees, seconds from the attack to the end, exit status, and the losses
against those of a run that nobody disturbed. Exit status 1 if an attack does not end as it should. An attack is a
function of an `attacks_on_….py` with the decorator `attack`; its docstring is what is done.
"""

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the relay of the tests

from ground import ATTACKS, ROOT, Ground, Outcome, with_checksums

for kind in ("data", "store", "processes", "commands"):
    importlib.import_module(f"attacks_on_{kind}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), default=ROOT / ".demo" / "data")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the attacks and end")
    options = parser.parse_args()
    chosen: Sequence[str] = options.only or list(ATTACKS)
    if options.list:
        print(*(f"{name}: {ATTACKS[name].__doc__}" for name in chosen), sep="\n")
        return 0
    print("| attack | what is done | what the user sees | seconds | exit status | losses |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(data=with_checksums(options.data, Path(folder) / "data"), folder=Path(folder))
        for name in chosen:
            outcome = ATTACKS[name](ground)
            print(row(name, outcome), flush=True)
            failed += bool(outcome.trouble)
    return 1 if failed else 0


def row(name: str, outcome: Outcome) -> str:
    distance = "–" if outcome.losses is None else f"within {outcome.losses:.0e}"
    said = f"**{outcome.trouble}**: {outcome.said}" if outcome.trouble else outcome.said
    said = " ".join(said.split()).replace("|", "/")
    what = " ".join((ATTACKS[name].__doc__ or "").split())
    return f"| {name} | {what} | {said[:200]} | {outcome.seconds:.1f} | {outcome.status} | {distance} |"


if __name__ == "__main__":
    sys.exit(main())
