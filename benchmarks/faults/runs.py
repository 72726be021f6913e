"""Small runs of training on two stages, started, watched and compared."""

import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.common import ROOT, environment, torchrun

LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+|nan)")
FLAGS = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--global-batch-size 16 --eval-iters 0 "
    "--dynapipe-timeout-s 60 --dynapipe-calibrate 0"
)
TOLERANCE = 1e-5
"""Of a loss, relative: lines have seven digits, and a plan that measured times have changed rounds otherwise."""
START_S, END_S = 300, 180


class Run:
    """A run of two stages under torchrun, whose output goes to `folder`/log."""

    def __init__(self, folder: Path, data: Path, flags: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        words = [
            *(*torchrun(2), str(ROOT / "pretrain_t5_multitask.py")),
            *("--dynapipe-config", str(ROOT / "configs" / "demo_t5.yaml"), "--dynapipe-data", str(data)),
            *("--dynapipe-report-dir", str(folder / "report")),
            *f"{FLAGS} {flags}".split(),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment())

    def at(self, iteration: int, *, within_s: float = START_S) -> None:
        """Wait until an iteration has been logged."""
        deadline = time.monotonic() + within_s
        while max(losses(self.log), default=0) < iteration:
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text()[-3000:]
                raise SystemExit(f"expected iteration {iteration} within {within_s:g} s:\n{text}")
            time.sleep(0.03)

    def children(self, word: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # the run has ended
            return found
        for process in family:
            with suppress(psutil.Error):  # it has ended meanwhile
                found += [process] if word in " ".join(process.cmdline()) else []
        return found

    def end(self, *, status: int, within_s: float = END_S) -> tuple[int, str]:
        """Wait for the end: exit status, and what is wrong with it."""
        try:
            ended = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            return self.process.wait(60), f"expected an end within {within_s:g} s"
        return ended, "" if ended == status else f"expected exit status {status}"


def lines(log: Path) -> list[tuple[int, float]]:
    """What a run has logged so far: iterations and losses."""
    return [(int(number), float(loss)) for number, loss in LINE.findall(log.read_text())]


def losses(log: Path) -> dict[int, float]:
    """Each iteration's loss so far."""
    return dict(lines(log))


def parting(found: dict[int, float], expected: dict[int, float]) -> float | None:
    distances = [abs(loss / expected[iteration] - 1) for iteration, loss in found.items() if iteration in expected]
    return max(distances, default=None)
