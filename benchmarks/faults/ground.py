"""Where attacks take place: runs of training, commands, and how they ended."""

import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+|nan)")
FLAGS = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--global-batch-size 16 --eval-iters 0 --dynapipe-timeout-s 60 --dynapipe-calibrate 0"
)
ITERATIONS = 20
TOLERANCE = 1e-5
START_S, END_S = 300, 180


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attack ended. `losses` is the largest relative distance from the undisturbed run's; None without any."""

    said: str
    seconds: float
    status: int
    losses: float | None = None
    trouble: str = ""
    """Why this is not how it should have ended; empty if it is."""


@dataclass
class Ground:
    """Where attacks take place: a copy of the dataset, a folder of their own, and the undisturbed run's losses."""

    data: Path
    folder: Path
    attacks: int = 0
    _copies: list[Path] = field(default_factory=list)

    @cached_property
    def undisturbed(self) -> dict[int, float]:
        run = Run(self)
        run.end(status=0)
        return losses(run.log)

    def fresh(self) -> Path:
        self.attacks += 1
        folder = self.folder / str(self.attacks)
        folder.mkdir()
        return folder

    def copy_of_data(self) -> Path:
        return Path(shutil.copytree(self.data, self.fresh() / "data"))


def with_checksums(source: Path, folder: Path) -> Path:
    """A copy of a dataset, with digests and checksums as `data prepare` writes them."""
    import msgspec
    import numpy as np

    from megatron_dynapipe.data.identity import FileDigests, checksums_path, files_of
    from megatron_dynapipe.data.indexed import IndexedReader
    from megatron_dynapipe.data.meta import SPLITS, read_meta, write_meta

    shutil.copytree(source, folder)
    for split in SPLITS:
        checksums_path(folder / split).unlink(missing_ok=True)
        reader = IndexedReader(folder / split)
        sums = [zlib.crc32(b"".join(part.tobytes() for part in reader[sample])) for sample in range(len(reader))]
        np.save(checksums_path(folder / split), np.asarray(sums, np.uint32))
    files = {path.name: FileDigests.of(path) for split in SPLITS for path in files_of(folder, split)}
    write_meta(folder, msgspec.structs.replace(read_meta(folder), files=files))
    return folder


class Run:
    """A run of two stages under torchrun."""

    def __init__(
        self, ground: Ground, flags: str = "", *, data: Path | None = None, report: Path | None = None
    ) -> None:
        self.folder = ground.fresh()
        self.log = self.folder / "log"
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(ROOT / "pretrain_t5_multitask.py"), "--dynapipe-config", str(ROOT / "configs" / "demo_t5.yaml")),
            *(
                "--dynapipe-data",
                str(data or ground.data),
                "--dynapipe-report-dir",
                str(report or self.folder / "report"),
            ),
            *f"{FLAGS} --train-iters {ITERATIONS} {flags}".split(),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        self.attacked = time.monotonic()

    def at(self, iteration: int, *, within_s: float = START_S) -> None:
        """Wait until an iteration has been logged; the attack begins now."""
        deadline = time.monotonic() + within_s
        while max(losses(self.log), default=0) < iteration:
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text()[-3000:]
                raise SystemExit(f"expected iteration {iteration} within {within_s:g} s:\n{text}")
            time.sleep(0.03)
        self.attacked = time.monotonic()

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

    def end(self, *, status: int, within_s: float = END_S) -> tuple[int, float, str]:
        """Wait for the end: exit status, seconds since the attack, and what is wrong with the status."""
        try:
            ended = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            return self.process.wait(60), within_s, f"expected an end within {within_s:g} s"
        return ended, time.monotonic() - self.attacked, "" if ended == status else f"expected exit status {status}"

    def outcome(self, ground: Ground, pattern: str, *, status: int, with_losses: bool = True) -> Outcome:
        """The outcome of a run that is to end with this status and to say something like `pattern`."""
        ended, seconds, trouble = self.end(status=status)
        text = self.log.read_text()
        found = re.search(pattern, text)
        if found is None and not trouble:
            trouble = f"expected {pattern!r} in its output"
        distance = parting(losses(self.log), ground.undisturbed) if with_losses else None
        if distance is not None and distance > TOLERANCE:
            trouble = trouble or f"its losses part by {distance:.0e}"
        said = found[0] if found else text.strip().splitlines()[-1]
        return Outcome(said=said, seconds=seconds, status=ended, losses=distance, trouble=trouble)


def losses(log: Path) -> dict[int, float]:
    """Logged so far. The second line after a start is Megatron's mean of two iterations."""
    return {int(number): float(loss) for number, loss in LINE.findall(log.read_text())}


def parting(found: dict[int, float], expected: dict[int, float]) -> float | None:
    distances = [abs(loss / expected[iteration] - 1) for iteration, loss in found.items() if iteration in expected]
    return max(distances, default=None)


def command(*words: object, status: int, pattern: str) -> Outcome:
    """The outcome of one of the project's commands."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_dynapipe", *map(str, words)],
            capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(said="nothing", seconds=60, status=-1, trouble="expected an end within 60 s")
    text = done.stdout + done.stderr
    found = re.search(pattern, text)
    trouble = "" if done.returncode == status else f"expected exit status {status}"
    if found is None or "Traceback" in text:
        trouble = trouble or f"expected {pattern!r} and no traceback"
    said = found[0] if found else text.strip()[-200:]
    return Outcome(said=said, seconds=time.monotonic() - began, status=done.returncode, trouble=trouble)


Attack = Callable[[Ground], Outcome]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function
