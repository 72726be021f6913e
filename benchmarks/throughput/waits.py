"""What a run waits for plans that a planner process makes ahead of it: the entry script trains, its records tell."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from comparison import Case
from jobs import ROOT, environment, torchrun

from megatron_dynapipe.report.records import IterationRecord, RunRecord, read_records
from megatron_dynapipe.report.summary import summarise

DEADLINE_S = 900.0


def plan_wait(case: Case, flags: Sequence[str], split: Sequence[int] | None, iterations: int) -> float:
    """Share of the time, from the third iteration on, that a planned run of so many waits for plans, 0 … 1.

    Args:
        case: model and layout.
        flags: of the run.
        split: layers of each stage; None splits them equally.
        iterations: three or more.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(case.layout.ranks), str(ROOT / f"pretrain_{case.model}_multitask.py"), *flags]
        command += ["--tensor-model-parallel-size", str(case.layout.tensor)]
        command += ["--pipeline-model-parallel-size", str(case.layout.pipeline)]
        command += ["--dynapipe-layers-per-stage", ",".join(map(str, split))] if split else []
        command += ["--train-iters", str(iterations), "--eval-iters", "0", "--dynapipe-report-dir", folder]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=DEADLINE_S)
        return share_in(Path(folder))


def share_in(folder: Path) -> float:
    """The share that the records of a run's ranks tell."""
    records = [record for path in sorted(folder.glob("rank-*.jsonl")) for record in read_records(path)]
    maximum = next(record.maximum for record in records if isinstance(record, RunRecord))
    iterations = [record for record in records if isinstance(record, IterationRecord)]
    return summarise(iterations, maximum=maximum).plan_wait_share
