"""Planners, stores and ranks killed at random moments of a job: its losses are equal to an undisturbed run's.

A start of the job goes on from the last checkpoint, and ends when one of its ranks is killed. `KILLS` and `KILLS_SEED`
try more, or others.
"""

import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import run_entry, script_of, words
from tests.helpers.processes import RanksFailedError, run_ranks

KILLS = int(os.environ.get("KILLS", "50"))
SEED = int(os.environ.get("KILLS_SEED", "0"))
ITERATIONS = 24
RANKS = 2
FLAGS = f"--pipeline-model-parallel-size {RANKS} --train-iters {ITERATIONS} --lr-decay-iters 100"
CHILDREN = {"planner": "megatron_dynapipe.service", "store": "valkey-server"}
KINDS = (*CHILDREN, "rank")


def disturbed(*, rank: int, world_size: int, argv: list[str], folder: str, seed: int) -> None:
    """Train on one rank, every loss in a file at once; a thread of rank 0 kills."""
    place, done = Path(folder), threading.Semaphore(0)
    (place / f"pid-{rank}").write_text(str(os.getpid()))

    def after(_: int) -> None:
        done.release()
        if losses:
            iteration, loss = list(losses.items())[-1]
            with (place / "losses").open("a") as file:
                file.write(f"{iteration} {loss!r}\n")

    recorded, losses = entry_scripts.record_losses, dict[str, float]()
    entry_scripts.record_losses = lambda _, norms: recorded(after, norms, losses)
    if rank == 0 and seed >= 0:
        threading.Thread(target=kill_until_the_end, args=(place, random.Random(seed), done), daemon=True).start()
    given = {"script": script_of("gpt"), "argv": argv, "kill": None, "pictures": False}
    ran = run_entry(rank=rank, world_size=world_size, **given)
    assert ran["status"] == 0, ran["stderr"]


def kill_until_the_end(folder: Path, draw: random.Random, done: threading.Semaphore) -> None:
    """Kill a process of a random kind some iterations and some time after the last, until it is a rank; note it."""
    iterations = draw.randint(2, 6)  # so that the job gets ahead
    while True:
        for _ in range(iterations):
            done.acquire()
        time.sleep(draw.uniform(0, 1))
        iterations = draw.randint(0, 2)
        ranks = [psutil.Process(int((folder / f"pid-{rank}").read_text())) for rank in range(RANKS)]
        found = {"rank": ranks}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                command = " ".join(process.cmdline()[:5])
                found |= {kind: [process] for kind, word in CHILDREN.items() if word in command}
        kind = draw.choice([kind for kind in KINDS if kind in found])
        with (folder / "kills").open("a") as file:
            file.write(f"{kind} {' '.join(str(process.pid) for each in found.values() for process in each)}\n")
        with suppress(psutil.Error):
            draw.choice(found[kind]).kill()


def start(data: Path, folder: Path, seed: int) -> bool:
    """One start of a job; whether it came to the job's end."""
    folder.mkdir(exist_ok=True)
    saved = folder / "saved"
    argv = words("gpt", data, f"{FLAGS} --save {saved} --load {saved} --save-interval 2", report=folder / "report")
    try:
        run_ranks(disturbed, RANKS, {"argv": argv, "folder": str(folder), "seed": seed}, deadline_s=280)
    except RanksFailedError as failed:
        if "exit code -9" not in str(failed):
            raise
        return False
    return True


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_a_job_has_the_losses_of_an_undisturbed_one(data: Path, tmp_path: Path) -> None:
    assert start(data, tmp_path / "undisturbed", -1)
    expected = {int(iteration): float(loss) for iteration, loss in lines(tmp_path / "undisturbed" / "losses")}
    assert len(expected) == ITERATIONS
    killed, ended, starts = Counter[str](), 0, 0
    while killed.total() < KILLS:
        folder = tmp_path / f"job-{ended}"
        starts += 1
        assert starts <= 4 * KILLS, f"{killed} in {starts} starts"
        if start(data, folder, SEED + starts):
            ended += 1
        killed = Counter(kind for path in tmp_path.glob("job-*/kills") for kind, *_ in lines(path))
    while not start(data, tmp_path / f"job-{ended}", -1):
        pass
    print(f"{dict(killed)} in {starts} starts of {ended + 1} jobs")
    assert not KINDS - killed.keys() or KILLS < 10
    for folder in tmp_path.glob("job-*"):
        losses = [(int(iteration), float(loss)) for iteration, loss in lines(folder / "losses")]
        assert {iteration for iteration, _ in losses} == expected.keys()
        assert [loss for _, loss in losses] == pytest.approx([expected[iteration] for iteration, _ in losses], rel=1e-6)
    pids = {int(pid) for path in tmp_path.glob("job-*/kills") for _, *pids in lines(path) for pid in pids}
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid in pids and is_of_a_run(process)]
    _, left = psutil.wait_procs(left, timeout=30)
    assert not left


def is_of_a_run(process: psutil.Process) -> bool:
    """Whether it is one of ours, and no other that has the number by now."""
    return any(word in " ".join(process.info["cmdline"] or ()) for word in CHILDREN.values())
