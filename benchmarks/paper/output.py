"""What every experiment leaves: NAME.json with the figures, NAME.md with the table, NAME.png with the chart."""

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import ROOT

FORMAT = "dynapipe-paper/1"
RESULTS = ROOT / "benchmarks" / "paper" / "results"
CHARTS = ROOT / "benchmarks" / "results"

PAPER = {
    "text": "Up to 4.39 × (T5) and 3.25 × (GPT) the throughput of packing on FLANv2.",
    "source": "Jiang et al., DynaPipe, EuroSys 2024, abstract (https://arxiv.org/abs/2311.10418)",
}
"""What is printed of the experiments that are shown here."""


def arguments(description: str, *, scales: Sequence[str] = ("simulated", "real")) -> argparse.ArgumentParser:
    """The arguments of every experiment."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--scale", choices=scales, default=scales[0], help="(%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    return parser


def chart(folder: Path, name: str) -> Path:
    """Where NAME.png goes: beside the page that shows it, or to the tables where `--output` was given."""
    return (CHARTS if folder == RESULTS else folder) / f"{name}.png"


def write(folder: Path, name: str, rows: Sequence[Any], table: str, **more: Any) -> None:
    """Write the figures and their table, with the command, the machine and the date."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"command": command(), "machine": machine(), "date": datetime.date.today().isoformat()}
    document = {"format": FORMAT, "experiment": name, **about, **more, "rows": list(rows)}
    (folder / f"{name}.json").write_text(one_row_a_line(document), encoding="utf-8")
    head = f"`{about['command']}`, {about['machine']}, {about['date']}\n\n"
    (folder / f"{name}.md").write_text(head + table + "\n", encoding="utf-8")
    print(table)


def one_row_a_line(document: dict[str, Any]) -> str:
    """JSON with a line for every entry, and for every row of the last one."""
    fields = [f"{_json(name)}: {_json(value)}" for name, value in document.items() if name != "rows"]
    rows = ",\n  ".join(map(_json, document["rows"]))
    return "{\n " + ",\n ".join([*fields, f'"rows": [\n  {rows}\n ]']) + "\n}\n"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def command() -> str:
    """How this process was started, from the repository's root; where the results went is left out."""
    module = ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)
    given = list(sys.argv[1:])
    if "--output" in given:
        place = given.index("--output")
        del given[place : place + 2]
    return shlex.join(["python", "-m", module, *given])


def machine() -> str:
    """Processor and cores."""
    model = platform.processor() or platform.machine()
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} cores ({model})"
