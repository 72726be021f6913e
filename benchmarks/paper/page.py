"""Write `benchmarks/results.md` from the tables in `benchmarks/paper/results` and the charts in `benchmarks/results`.

python -m benchmarks.paper.page
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.paper.output import RESULTS, chart

WIDTH = 120
MOST_ROWS = 16
"""A longer table is a link."""


@dataclass(frozen=True, slots=True)
class Section:
    """One experiment of the page."""

    title: str
    text: str
    names: tuple[str, ...]


SECTIONS = (
    Section(
        "Throughput over the maximum length",
        "Global batches of 65,536 tokens (real: 32 samples). The longer samples may be, the more padding and packing "
        "waste. Packed rows whose attention is kept apart, which the paper did not compare with, come within a few "
        "percent where a layout with one or two stages fits; the gap grows with stages and length.",
        ("throughput-length-simulated", "throughput-length-real"),
    ),
    Section(
        "Throughput over the global batch size",
        "Maximum length 2048 (real: 1536). Small global batches have few micro-batches to fill a pipeline with. The "
        "real runs shared their cores with other work, which halves speeds and spoils predictions; methods took turns, "
        "so ratios hold.",
        ("throughput-batch-simulated", "throughput-batch-real"),
    ),
    Section(
        "Padding efficiency",
        "Real tokens over positions. For T5, packing of 2023 fills rows of inputs and leaves rows of targets, which "
        "are as long, mostly empty.",
        ("padding-simulated", "padding-real"),
    ),
    Section(
        "Ablations",
        "One part of the planner replaced in planned, padded micro-batches; simulated at (data, tensor, pipeline) = "
        "(1, 2, 4). Means are over the batches for which a variant has a plan. GPipe holds every micro-batch at once, "
        "for which there is no memory.",
        ("ablations-simulated", "ablations-real"),
    ),
    Section(
        "Planning time",
        "Of one core; plans are made ahead of training by a process of its own. The published planner was timed on "
        "another machine.",
        ("planning-time-simulated",),
    ),
    Section(
        "Accuracy of predictions",
        "Iterations with costs as profiled; memory as counted by hooks. "
        "`benchmarks/cost_accuracy` has the errors on published profiles of A100s.",
        ("accuracy-real",),
    ),
)


def main() -> None:
    (ROOT / "benchmarks" / "results.md").write_text(page(RESULTS), encoding="utf-8")


def page(folder: Path) -> str:
    """All sections; an experiment that has not been run says so."""
    parts = [(Path(__file__).parent / "introduction.md").read_text(encoding="utf-8")]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n{textwrap.fill(section.text, WIDTH)}\n")
        parts += [shown(folder, name) for name in section.names]
    return "\n".join(parts)


def shown(folder: Path, name: str) -> str:
    """One experiment: its command, its chart, and its table or where that is."""
    kind = name.rpartition("-")[2].capitalize()
    path = folder / f"{name}.md"
    if not path.exists():
        return f"### {kind}\n\nNot measured yet.\n"
    about, _, table = path.read_text(encoding="utf-8").partition("\n\n")
    rows = len(table.splitlines()) - 2
    if rows > MOST_ROWS:
        table = f"[The table, {rows} rows](paper/results/{path.name})\n"
    picture = f"![{name}](results/{name}.png)\n\n" if chart(folder, name).exists() else ""
    return f"### {kind}\n\n{about}\n\n{picture}{table}"


if __name__ == "__main__":
    main()
