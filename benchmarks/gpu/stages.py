"""Every stage of a pipeline in turn on one GPU: what an iteration takes, composed of passes that were measured.

    python benchmarks/gpu/stages.py --output FILE [--budget-s 270] [--cost-model llama3_8b=FILE …] [-- FLAGS of runs]
    python benchmarks/gpu/stages.py --device cpu --small --real --output FILE     # against real runs, without a GPU

A LLaMA of 8B on 4 and 8 stages and a T5-XXL on 8, a batch of 65,536 tokens: planned, and in the packed rows of other
trainers that are predicted fastest, with their best pipeline (`planned.py`). Each stage's model is built, and its own
instruction list run by training's executor, with receives that are there and sends that go nowhere (`playing.py`).
The first turn loads kernels; the passes of four more are timed by the device's events, and medians count. The lists
are then replayed by the planner's simulator with these times and the links' costs (`composed.py`). Printed are
predicted and composed time, the errors of each kind of pass, memory planned and allocated beside parameters and
gradients, and the ratio of both ways.

FILE is written after every stage. Plans are made by processes side by side meanwhile. Costs are those of the files that
`--cost-model` names, else computed; on a CPU they are measured first. With --real each pipeline also runs in as many
processes as it has stages, and its time stands beside the composed one.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import msgspec

from benchmarks.common import markdown, number, say, torchrun
from benchmarks.gpu.composed import compose, errors, least, medians, predicted_times, times_of
from benchmarks.gpu.machine import Budget, NotRunError, Processes, ProcessFailedError, provenance, run
from benchmarks.gpu.planned import METHODS, PLANNED, ROWS, Case, Planned, cases
from megatron_dynapipe import config, cpu
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.memory import peak_bytes
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.costing import Network

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TURNS = {"cuda": 5, "cpu": 6}
"""The first of which does not count."""
LEAST_S = 8.0
"""Below which no stage is begun."""
COLUMNS = (
    "pipeline",
    "way",
    "micro-batches",
    "predicted, ms",
    "composed, ms",
    "composed tokens/s",
    "predicted / composed",
)
COLUMNS += (
    "real, ms",
    "composed / real",
    "composed / of real passes",
    "times the rows'",
    "activations planned / allocated",
)


@dataclass(slots=True, kw_only=True)
class Row:
    """A case by one method, and what is known of it so far."""

    planned: Planned
    stages: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[Pass, float]] = field(default_factory=list)
    charged: list[dict[Pass, float]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    real: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def report(self) -> dict[str, Any]:
        """For the file."""
        case, settings = self.planned.case, self.planned.settings
        return {
            "pipeline": case.title,
            "method": self.planned.method,
            "how": self.planned.how,
            "costs": case.costs,
            "chunks": settings.chunks,
            "layers_per_stage": list(settings.layout.layers_per_stage),
            **self.figures,
            "real": self.real,
            "stages": self.stages,
            "note": self.note,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds, on 2 and 4 stages")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="for all figures (.json)")
    parser.add_argument("--budget-s", type=float, default=270, help="seconds for everything (%(default)g)")
    parser.add_argument("--cost-model", nargs="*", default=[], metavar="MODEL=FILE", help="costs to plan with")
    parser.add_argument("--only", nargs="*", type=int, metavar="N", help="pipelines, by their place, from 0")
    parser.add_argument("--real", action="store_true", help="run them in as many processes, too")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="of the runs, as in a run file")
    options = parser.parse_args()
    budget = Budget(options.budget_s)
    origin = provenance(options.device)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, origin, budget, Path(folder))
        try:
            comparison.run()
        finally:
            comparison.end()
    sys.exit(not any("composed_ms" in row.figures for row in comparison.rows))


class Comparison:
    """All cases by both methods.

    Args:
        options: of the command line.
        origin: what figures depend on.
        budget: of everything.
        folder: for plans and logs.
    """

    def __init__(self, options: argparse.Namespace, origin: dict[str, Any], budget: Budget, folder: Path) -> None:
        self.options, self.budget, self.folder = options, budget, folder
        self._origin = origin
        self.rows: list[Row] = []
        self._failures: list[dict[str, str]] = []
        self._planning: dict[tuple[int, str], Processes] = {}

    def run(self) -> None:
        """Make the plans, run every stage of each, compose, print."""
        made = self._cases()
        for place, case in enumerate(made):
            for method in METHODS:
                self._planning[place, method] = self._start_planning(case, place, method)
        say(f"{len(self._planning)} plans are being made")
        cpu.quieten()
        cpu.enable(self.options.device)  # before Megatron is imported
        from benchmarks.gpu import playing as _imported  # noqa: F401  # while plans are made

        for place, case in enumerate(made):
            for method in METHODS:
                self._guarded(f"{case.title}, {method}", lambda at=(place, method): self._one(*at))
        print(markdown(COLUMNS, [cells(row, self.rows) for row in self.rows]), flush=True)
        print(markdown(ERROR_COLUMNS, [line for row in self.rows for line in error_cells(row)]), flush=True)

    def end(self) -> None:
        """End plans that are still being made."""
        for process in self._planning.values():
            process.kill()

    def _cases(self) -> list[Case]:
        costs = dict(pair.split("=", 1) for pair in self.options.cost_model)
        flags = flags_of([word for word in self.options.flags if word != "--"])
        made = cases(self.folder, self.options.device, costs, small=self.options.small, flags=flags)
        chosen = self.options.only if self.options.only is not None else range(len(made))
        made = [case for place, case in enumerate(made) if place in chosen]
        if self.options.device == "cpu":
            return [case if case.name in costs else self._measured(case) for case in made]
        return made

    def _measured(self, case: Case) -> Case:
        """A case with costs of this CPU, which are measured once for each model."""
        path = self.folder / f"{case.name}.json"
        if not path.exists():
            say(f"measuring {case.name}")
            words = [sys.executable, "-m", "megatron_dynapipe", "profile", "--model", case.family.value]
            words += ["--output", str(path), "--budget-minutes", "0.25", "--max-positions", "4096"]
            words += ["--vocabulary", str(case.vocabulary), "--", *case.flags, "--pipeline-model-parallel-size", "1"]
            run([words], self.budget, environments=[ONE_THREAD], log=self.folder / f"profile-{case.name}")
        return msgspec.structs.replace(case, costs=str(path))

    def _start_planning(self, case: Case, place: int, method: str) -> Processes:
        where = self.folder / f"{place}-{method}"
        file = self.folder / f"{place}-{method}.json"
        file.write_bytes(msgspec.json.encode(case))
        words = [sys.executable, "-m", "benchmarks.gpu.planned", str(file), method, str(where)]
        return Processes([words], environments=[ONE_THREAD], log=self.folder / f"{place}-{method}-log")

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        """Whatever one raises, it is noted, and the others are made."""
        try:
            work()
        except (ProcessFailedError, NotRunError) as failure:
            self._note_failure(what, str(failure)[-3000:])
        except Exception:  # noqa: BLE001 - whatever it is
            self._note_failure(what, traceback.format_exc()[-3000:])

    def _note_failure(self, what: str, why: str) -> None:
        say(f"{what}: {why.strip().splitlines()[-1]}")
        self._failures.append({"what": what, "why": why})
        self._write()

    def _one(self, place: int, method: str) -> None:
        """A case by a method: every stage in turn."""
        process = self._planning[place, method]
        process.wait(self.budget.deadline())
        where = self.folder / f"{place}-{method}" / "planned.json"
        planned = msgspec.json.decode(where.read_bytes(), type=Planned)
        row = Row(planned=planned)
        self.rows.append(row)
        for stage in range(planned.settings.pipeline_parallel):
            left = self.budget.began + self.budget.seconds - time.monotonic()
            if left < (LEAST_S if self.options.device == "cuda" else 0):
                raise NotRunError(f"no time left of {self.budget.seconds:g} s before stage {stage}")
            self._play(row, stage)
            self._write()
        if self.options.real:
            self._run_together(row, where)
        self._compose(row)
        self._write()
        say(" ".join(cells(row, self.rows)))

    def _play(self, row: Row, stage: int) -> None:
        from benchmarks.gpu.playing import alone

        began = time.perf_counter()
        is_first = len(self.rows) == 1 and stage == 0
        with alone(row.planned, stage, is_warm=not is_first) as player:
            built = time.perf_counter()
            turns = [player.turn() for _ in range(TURNS[self.options.device])][1:]
            allocated, own_bytes = player.peak_bytes(), player.own_bytes
        of_turns = medians if self.options.device == "cuda" else least
        row.times.append(of_turns([times_of(events, besides=False) for events in turns]))
        row.charged.append(of_turns([times_of(events, besides=True) for events in turns]))
        plan = row.planned.load()
        needed = peak_bytes(plan, plan.replicas[0], stage, row.planned.settings.element_bytes)
        figures = {
            "stage": stage,
            "built_s": round(built - began, 2),
            "turns_s": round(time.perf_counter() - built, 2),
            "passes_ms": sum(row.times[-1].values()) / 1e6,
            "with_the_rest_ms": sum(row.charged[-1].values()) / 1e6,
            "parameters_and_gradients_mb": own_bytes / BYTES_PER_MB,
            "planned_mb": (needed - plan.model_state_bytes[stage]) / BYTES_PER_MB,
            "allocated_mb": None if allocated is None else allocated / BYTES_PER_MB,
        }
        row.stages.append(figures)
        say(f"{row.planned.case.title}, {row.planned.method}: {json.dumps(figures)}")

    def _run_together(self, row: Row, where: Path) -> None:
        """The same in as many processes, whose links are those that times are composed with."""
        output = where.with_name("real.json")
        words = [*torchrun(row.planned.settings.pipeline_parallel), "-m", "benchmarks.gpu.playing"]
        run([[*words, str(where), str(output)]], self.budget, environments=[ONE_THREAD], log=where.with_name("real"))
        row.real = json.loads(output.read_text())
        links = msgspec.convert(row.real["links"], type=dict[str, Link])
        settings = row.planned.settings
        network = Network.over(links, devices_per_node=settings.pipeline_parallel)
        row.planned = msgspec.structs.replace(row.planned, settings=msgspec.structs.replace(settings, network=network))

    def _compose(self, row: Row) -> None:
        plan, settings = row.planned.load(), row.planned.settings
        simulated = compose(plan, settings, row.charged)
        row.figures |= {
            "micro_batches": len(plan.replicas[0].micro_batches),
            "real_tokens": plan.totals.real_tokens,
            "predicted_ms": plan.totals.predicted_ns / 1e6,
            "composed_ms": simulated.makespan_ns / 1e6,
            "composed_of_passes_alone_ms": compose(plan, settings, row.times).makespan_ns / 1e6,
            "errors": errors(predicted_times(plan), row.times),
        }
        if passes := row.real.get("passes_ns"):
            lists = [stage.instructions for stage in plan.replicas[0].stages]
            steps = [[step for step in instructions if isinstance(step, Pass)] for instructions in lists]
            times = [dict(zip(*both, strict=True)) for both in zip(steps, passes, strict=True)]
            row.figures["composed_of_real_passes_ms"] = compose(plan, settings, times).makespan_ns / 1e6

    def _write(self) -> None:
        """Write what is known so far, in place of what was."""
        report = {
            "format": "dynapipe-gpu-stages/1",
            **self._origin,
            "rows": [row.report() for row in self.rows],
            "failures": self._failures,
        }
        output = self.options.output
        part = output.with_name(f"{output.name}.part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(output)


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Flags of a command line as a run file has them; a switch that is to be left out is `--dynapipe-unset NAME`."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = True
        elif name == config.UNSET_FLAG.removeprefix("--"):
            flags.pop(name, None)
            flags[word] = False
        else:
            flags[name] = word
    return flags


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """A line of the first table."""
    figures, case = row.figures, row.planned.case
    if "composed_ms" not in figures:
        return [case.title, row.planned.how, *["–"] * (len(COLUMNS) - 2)]
    composed, real = figures["composed_ms"], row.real.get("median_ms")
    of_real_passes = figures.get("composed_of_real_passes_ms")
    other = [
        each.figures["composed_ms"]
        for each in rows
        if each.planned.method == ROWS and each.planned.case.title == case.title and "composed_ms" in each.figures
    ]
    memory = [stage["planned_mb"] / stage["allocated_mb"] for stage in row.stages if stage["allocated_mb"]]
    return [
        case.title,
        row.planned.how,
        str(figures["micro_batches"]),
        f"{figures['predicted_ms']:,.1f}",
        f"{composed:,.1f}",
        f"{figures['real_tokens'] / composed * 1e3:,.0f}",
        f"{figures['predicted_ms'] / composed:.3f}",
        number(real, "{:,.1f}"),
        number(composed / real if real else None, "{:.3f}"),
        number(composed / of_real_passes if of_real_passes else None, "{:.3f}"),
        number(other[0] / composed if other and row.planned.method == PLANNED else None, "{:.3f}"),
        f"{min(memory):.2f}–{max(memory):.2f} (median {median(memory):.2f})" if memory else "–",
    ]


ERROR_COLUMNS = ("pipeline", "way", "passes", "error, median", "nine tenths", "sum predicted over measured")


def error_cells(row: Row) -> list[list[str]]:
    """Lines of the second table."""
    about = [row.planned.case.title, row.planned.how]
    return [
        [*about, kind, f"{middle:.1%}", f"{most:.1%}", f"{1 + whole:.3f}"]
        for kind, (middle, most, whole) in row.figures.get("errors", {}).items()
    ]


if __name__ == "__main__":
    main()
