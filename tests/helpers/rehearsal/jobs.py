"""Runs entry scripts on rehearsed devices, one run after another, from one process that imports Megatron once.

    python -m tests.helpers.rehearsal.jobs RESULTS < JOBS        # in `launch.environment`, which `run_all` sees to

The ranks are forked with Megatron imported, on the devices that `sitecustomize` has given torch there.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.entry_scripts import ROOT, run_entry
from tests.helpers.processes import RanksFailedError, run_ranks
from tests.helpers.rehearsal import launch


@dataclass(frozen=True)
class Job:
    """A run of an entry script: how many ranks, and its command line."""

    script: str
    argv: Sequence[str]
    ranks: int


def run_all(jobs: Sequence[Job], folder: Path, *, engine: bool = False, deadline_s: float = 600) -> list[Any]:
    """Each job's ranks, as `run_entry` returns them; the error's text for a job whose ranks did not end."""
    results = folder / "results.json"
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.rehearsal.jobs", str(results)],
        input=json.dumps([asdict(job) for job in jobs]).encode(),
        env=launch.environment(8, engine=engine),
        cwd=ROOT,
        timeout=deadline_s,
        check=True,
    )
    made: list[Any] = json.loads(results.read_text())
    return made


def _run(job: Job) -> Any:
    arguments = {"script": job.script, "argv": list(job.argv), "kill": None, "pictures": False}
    try:
        return run_ranks(run_entry, job.ranks, arguments, deadline_s=240)
    except RanksFailedError as error:
        return str(error)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([_run(Job(**job)) for job in json.load(sys.stdin)]))
