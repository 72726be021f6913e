"""Attacks on processes and on the files that they write."""

import signal
import time

import psutil
from ground import Ground, Outcome, Run, attack, losses, parting


@attack
def launcher_killed(ground: Ground) -> Outcome:
    """torchrun gets SIGKILL."""
    run = Run(ground)
    run.at(4)
    family = [
        p for p in psutil.Process(run.process.pid).children(recursive=True) if "spawn" not in " ".join(p.cmdline())
    ]
    run.process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=30)
    seconds = time.monotonic() - run.attacked
    for process in left:
        process.kill()
    distance = parting(losses(run.log), ground.undisturbed)
    said = f"{len(family)} processes of the run end, {len(left)} are left"
    trouble = "expected none to be left" if left else ""
    return Outcome(said=said, seconds=seconds, status=run.process.wait(), losses=distance, trouble=trouble)


@attack
def disk_full(ground: Ground) -> Outcome:
    """No record can be written: the disk of the report folder is full."""
    report = ground.fresh()
    (report / "rank-0.jsonl").symlink_to("/dev/full")
    run = Run(ground, report=report)
    return run.outcome(ground, r"warning: rank 0 cannot record an iteration, and goes on without[^\n]*", status=0)


@attack
def picture_fails(ground: Ground) -> Outcome:
    """The picture at the run's end cannot be written."""
    report = ground.fresh()
    (report / "timeline.png").mkdir()
    run = Run(ground, report=report)
    return run.outcome(ground, r"warning: rank 0 cannot draw the last iteration, and goes on without[^\n]*", status=0)
