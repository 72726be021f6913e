"""A certificate of a recipe of Megatron-Bridge: its script is run in one process, and as planned, and compared."""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.extras import check_bridge
from megatron_dynapipe.processes import run_guarded
from megatron_dynapipe.tools.certify.records import RankRecord, read_records
from megatron_dynapipe.tools.certify.verdict import Check, losses_of, of_first, of_iterations, of_steps

WORKER = "megatron_dynapipe.tools.certify.recipe_rank"
"""The module that every rank runs."""
BEGIN = "begin"
REFERENCE = "reference"
PLANNED = "planned"
FP32 = "fp32"
_TAIL = 60
"""Lines of a run that failed."""


def certify_recipe(
    script: Sequence[str],
    *,
    ranks: int,
    iterations: int = 3,
    deadline_s: float = 1800.0,
    said: Callable[[str], None] = lambda _: None,
) -> tuple[list[Check], dict[str, float], str]:
    """Train the recipe of a script, which has a block of `planned`, as planned and in one process, and compare.

    Args:
        script: a Python file and its words.
        ranks: how many the planned run has.
        iterations: that both train, from one checkpoint.
        deadline_s: the deadline of each run.
        said: called with a line before each run and after it.

    Returns:
        The table; no differences of single parameters' gradients, which are not compared; the rates of the steps.

    Raises:
        ConfigError: a run could not be started, or ended early; the message is its own.
        InstallationError: there is no Megatron-Bridge.
    """
    check_bridge()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(role: str, precision: str, ranks: int) -> Sequence[RankRecord]:
            place = folder / f"{role}-{precision}"
            place.mkdir()
            said(f"run: {role}, {precision}, ranks: {ranks}, for at most {deadline_s:.0f} s")
            began = time.monotonic()
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            worker = ["-m", WORKER, role, precision, str(iterations), str(folder), *script]
            status, lines = run_guarded([sys.executable, *torchrun, *worker], deadline_s=deadline_s)
            if status is None:
                raise ConfigError(f"the {role} run in {precision} was not done within {deadline_s:g} s")
            if status or len(records := read_records(place)) < ranks:
                tail = "\n".join(lines[-_TAIL:])
                raise ConfigError(f"the {role} run in {precision} ended with status {status}; it said:\n{tail}")
            said(f"run ended after {time.monotonic() - began:.0f} s")
            return records

        (begun,) = run(BEGIN, FP32, 1)
        for precision in filter(None, (FP32, begun.half)):
            run(REFERENCE, precision, 1)
            run(PLANNED, precision, ranks)
        said("not compared: losses of single samples, isolation, repetition, dropout")
        return compared(folder), {}, begun.notes[0]


def compared(folder: Path) -> list[Check]:
    """The table of the runs in a folder, each in one of its own, "ROLE-PRECISION"."""
    (begun,), (alone,) = (read_records(folder / f"{role}-{FP32}") for role in (BEGIN, REFERENCE))
    planned = read_records(folder / f"{PLANNED}-{FP32}")
    checks = [
        of_iterations("losses", losses_of(planned), alone.losses),
        of_iterations("gradient norms", planned[-1].norms, alone.norms),
        *of_steps(folder / f"{PLANNED}-{FP32}", folder / f"{REFERENCE}-{FP32}"),
    ]
    changed = [(rank, record.unfrozen) for rank, record in enumerate(planned) if record.unfrozen is not None]
    if changed:
        names = [f"rank {rank}: {name}" for rank, found in changed for name in found]
        checks.append(Check(name="frozen weights", error=len(names), allowed=0.0, where=names[0] if names else ""))
    if half := begun.half:
        (other,), planned = (read_records(folder / f"{role}-{half}") for role in (REFERENCE, PLANNED))
        checks += [
            of_first(f"losses in {half}", losses_of(planned), other.losses, alone.losses, half),
            of_first(f"gradient norms in {half}", planned[-1].norms, other.norms, alone.norms, half),
        ]
    return checks
