"""How the checks are run: ranks that stay up, what several checks need computed once, bounds."""

import importlib.util
import math
import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import torchrun
from benchmarks.gpu.machine import Budget, NotRunError, Ranks, run
from megatron_dynapipe.megatron.entry.bootstrap import environment
from tests.helpers.layouts.layout import named

WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")
KEPT = 6
"""Sets of ranks that stay up without an order."""
COMPILERS = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
"""Inductor would start a process for each core, in every rank."""

Figures = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Check:
    """What is checked, and by what.

    Attributes:
        name: of what is checked.
        make: makes it; whatever it raises, it has failed.
        expected_s: seconds on a GPU beside others, of which budgets are shared by.
    """

    name: str
    make: "Callable[[Case], Figures]"
    expected_s: float = 25.0


class OutOfBoundsError(Exception):
    """A figure that does not hold; the first argument has all of them."""


@dataclass
class Idle:
    """Ranks without an order, by their kind: threads take them and put them back."""

    _kept: OrderedDict[int, tuple[tuple[object, ...], Ranks]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, kind: tuple[object, ...]) -> Ranks | None:
        """Ranks of a kind, if there are any."""
        with self._lock:
            key = next((key for key, (other, _) in self._kept.items() if other == kind), None)
            return None if key is None else self._kept.pop(key)[1]

    def put(self, kind: tuple[object, ...], ranks: Ranks, most: int = KEPT) -> None:
        """Keep ranks; end those that waited longest where there are too many."""
        with self._lock:
            self._kept[id(ranks)] = kind, ranks
            ended = [self._kept.popitem(last=False)[1][1] for _ in range(len(self._kept) - most)]
        for late in ended:
            late.processes.kill()

    def end(self) -> None:
        """End all."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1][1].processes.kill()


@dataclass
class Once:
    """What is computed once for all checks, whose threads wait for one of them to do it."""

    _made: dict[tuple[object, ...], Future[Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """The value; where making it fails, whoever waits fails likewise, and the next one tries again."""
        with self._lock:
            mine = key not in self._made
            made = self._made.setdefault(key, Future())
        if mine:
            try:
                made.set_result(make())
            except BaseException as error:
                with self._lock:
                    del self._made[key]
                made.set_exception(error)
                raise
        return made.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the checks are run here; each gets its own share of the budget."""

    device: str
    small: bool
    budget: Budget
    folder: Path
    output: Path
    idle: Idle = field(default_factory=Idle)
    once: Once = field(default_factory=Once)

    @property
    def families(self) -> Sequence[str]:
        return ("t5",) if self.small else ("t5", "gpt")

    @property
    def steps(self) -> int:
        return 2 if self.small else 5

    def train(
        self, row: str, what: str = "train", *, alone: bool = True, device: str = "", steps: int = 0
    ) -> list[Any]:
        """What every rank of a layout (`named` reads it) learned: all of them on one device, or apart.

        Ranks stay up for the next layout of as many, since each start takes seconds; those that failed start anew.
        """
        layout, device = named(row), device or self.device
        kind = (device, layout.ranks, layout.tensor > 1, alone)
        ranks = self.idle.take(kind) or self._started(device, layout.ranks, layout.tensor, alone=alone)
        learned = ranks.carry_out(self.budget, layout=row, what=what, steps=steps or self.steps)
        self.idle.put(kind, ranks)
        return learned

    def _started(self, device: str, count: int, tensor: int, *, alone: bool) -> Ranks:
        words = [*WORKER, "--device", device, *([] if alone else ["--spread"])]
        return Ranks(words, environments(device, count, tensor, alone=alone), self.new_folder())

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def run(self, *words: object) -> str:
        """The standard output of a command of this Python."""
        command = [sys.executable, *map(str, words)]
        return run([command], self.budget, environments=[COMPILERS], log=self.new_folder() / "run")[0]

    def torchrun(self, *scripts: str, ranks: int = 1) -> list[str]:
        """Standard outputs of scripts with their flags, each under a torchrun, side by side."""
        words = [[*torchrun(ranks), *script.split()] for script in scripts]
        threads = [{"OMP_NUM_THREADS": "1", **COMPILERS}] * len(words)
        return run(words, self.budget, environments=threads, log=self.new_folder() / "torchrun")


def environments(device: str, count: int, tensor: int = 1, *, alone: bool = True) -> list[dict[str, str]]:
    """Of so many ranks, as a run sets it: all on the first device, or apart."""
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", **COMPILERS}
    if device == "cuda":  # one hardware queue with tensor parallelism
        major, _ = torch.cuda.get_device_capability()
        common |= environment(tensor_parallel=tensor, stages=count, capability=major, environ=os.environ)
    return [common | {"RANK": str(r), "LOCAL_RANK": str(0 if alone else r)} for r in range(count)]


def need_devices(case: Case, ranks: int) -> None:
    """Raise NotRunError where ranks would share a GPU, which NCCL refuses."""
    if case.device == "cuda" and torch.cuda.device_count() < ranks:
        raise NotRunError(f"{ranks} GPUs are needed, each with one rank over NCCL; found {torch.cuda.device_count()}")


def need_engine(case: Case) -> None:
    """Raise NotRunError without a GPU or without Transformer Engine."""
    if case.device == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        raise NotRunError("no GPU" if case.device == "cpu" else "Transformer Engine is not installed")


def within(measured: Mapping[str, tuple[float, float]]) -> Figures:
    """The figures with their bounds; raises OutOfBoundsError if one does not hold."""
    figures: Figures = {}
    for name, (value, bound) in measured.items():
        figures |= {name: value} if math.isinf(bound) else {name: value, f"{name}_bound": bound}
    if any(not value <= bound for value, bound in measured.values()):
        raise OutOfBoundsError(figures)
    return figures
