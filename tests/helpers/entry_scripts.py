"""Running the entry scripts on forked ranks, with every iteration's loss.

Ranks are forked with Megatron imported: a run of two starts in a second. Losses are taken from Megatron's own
`training_log`, per step: its log lines may be of several.
"""

import contextlib
import functools
import io
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.processes import run_ranks

ROOT = Path(__file__).parents[2]
SMALL = {
    "t5": "--encoder-num-layers 2 --decoder-num-layers 2 --seq-length 64 --decoder-seq-length 24",
    "gpt": "--num-layers 4 --seq-length 96",
}
TRAINING = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --max-position-embeddings 96 "
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --lr 1e-3 --lr-decay-style constant "
    "--seed 7 --log-interval 1 --eval-interval 100 --eval-iters 0 --global-batch-size 16"
)
"""Flags of Megatron."""
COMMON = f"{TRAINING} --dynapipe-timeout-s 30 --dynapipe-calibrate 0"


def train(
    family: str,
    data: Path,
    flags: str,
    *,
    ranks: int,
    report: Path,
    status: int = 0,
    kill: str | None = None,
    pictures: bool = False,
    deadline_s: float = 150,
) -> list[dict[str, Any]]:
    """Run an entry script; per rank its losses by iteration (last stage), stdout and stderr.

    Every rank must end with exit status `status`. At the third iteration the children of rank 0 whose command line
    has the word `kill` are killed, or stopped (`stop WORD`). Without `pictures` the report's, which takes a second, is
    not drawn.
    """
    arguments = {"script": script_of(family), "argv": words(family, data, flags, report=report)}
    runs = run_ranks(run_entry, ranks, arguments | {"kill": kill, "pictures": pictures}, deadline_s=deadline_s)
    for rank, run in enumerate(runs):
        assert run["status"] == status, f"rank {rank} ended with {run['status']}:\n{run['stderr'][-3000:]}"
    return runs


def losses(family: str, data: Path, flags: str, *, ranks: int, report: Path) -> dict[str, float]:
    """Those of a run by iteration, from its last stage."""
    by_iteration: dict[str, float] = train(family, data, flags, ranks=ranks, report=report)[-1]["losses"]
    return by_iteration


def reported(runs: list[dict]) -> str:
    """The error of a run that could not start: one rank says it, whichever, and it alone."""
    (message,) = [run["stderr"].partition("error: ")[2] for run in runs if "error: " in run["stderr"]]
    return message


def script_of(family: str) -> str:
    return f"pretrain_{family}_multitask.py"


def words(family: str, data: Path, flags: str, *, report: Path) -> list[str]:
    """The command line of a small run."""
    ours = ["--dynapipe-data", str(data), "--dynapipe-report-dir", str(report)]
    return [*SMALL[family].split(), *COMMON.split(), *ours, *flags.split()]


def run_script(script: str, argv: Sequence[str]) -> int:
    """Run an entry script's `main` in this process as the script does; the exit status.

    The script is not made `__main__`: Megatron's checkpoint writer starts a process that imports `__main__` again, and
    all of torch with it.
    """
    from megatron_dynapipe.megatron.entry import bootstrap

    sys.argv = [script, *argv]
    try:
        names = runpy.run_path(str(ROOT / script))
        bootstrap.run(names["adapting"](names["main"]))
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def run_entry(*, rank: int, world_size: int, script: str, argv: list[str], kill: str | None, pictures: bool) -> dict:
    """On one rank: what the script says, how it ends, its losses and its gradients' norms."""
    from megatron_dynapipe.megatron.supply import recorder

    def after(iteration: int) -> None:
        if kill is not None and rank == 0 and iteration == 3:
            kill_children(kill)

    losses = record_losses(after, norms := dict[str, float]())
    if not pictures:
        recorder._told = undrawn
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = run_script(script, argv)
    said = {"stdout": output.getvalue(), "stderr": errors.getvalue()}
    return {"status": status, "losses": losses, "norms": norms, **said}


def undrawn(folder: Path) -> str:
    """What a run's report says at its end, made in this process, without pictures."""
    from megatron_dynapipe.cli import report
    from megatron_dynapipe.report import timeline

    timeline.draw = lambda panels, path: path
    with contextlib.redirect_stdout(io.StringIO()) as said:
        report._end_of_run(folder)
    return said.getvalue().rstrip()


def record_losses(
    after: Callable[[int], None] = lambda _: None,
    norms: dict[str, float] | None = None,
    losses: dict[str, float] | None = None,
) -> dict[str, float]:
    """Losses by iteration, filled on the last stage while Megatron trains in this process.

    `norms` gets every rank's norms of gradients, but for iterations that the loss scale skips.
    """
    from megatron.training import training

    losses = {} if losses is None else losses
    log = training.training_log

    @functools.wraps(log)  # start-up looks at what the function calls
    def logged(loss_dict: dict, total: dict, learning_rate: float, iteration: int, *rest: Any, **named: object):
        if "lm loss" in loss_dict:
            losses[str(iteration)] = loss_dict["lm loss"].item()
        *_, skipped, norm = rest[:4]
        if norms is not None and not skipped:
            norms[str(iteration)] = float(norm)
        after(iteration)
        return log(loss_dict, total, learning_rate, iteration, *rest, **named)

    training.training_log = logged
    return losses


def kill_children(word: str) -> None:
    """Kill children, or stop them ("stop WORD")."""
    stops, word = word.startswith("stop "), word.removeprefix("stop ")
    victims = [p for p in psutil.Process().children(recursive=True) if word in " ".join(p.cmdline()[:5])]
    assert victims, f"no child process with {word} in its command line"
    for victim in victims:
        victim.suspend() if stops else victim.kill()
