"""What the benchmarks share: starting processes, taking turns, ratios with their intervals, and tables."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_dynapipe.processes import package_path

ROOT = Path(__file__).resolve().parents[1]
DEMO_DATA = ROOT / ".demo" / "data"
DRAWS = 2000
"""Resampled pairs of an interval."""


def environment() -> dict[str, str]:
    """One thread a process, of this checkout."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": package_path()}


def torchrun(ranks: int) -> list[str]:
    """The command that starts so many processes of what follows it."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run_quietly(command: Sequence[object], *, timeout_s: float) -> None:
    """Run a command of this checkout without its output; raises CalledProcessError or TimeoutExpired."""
    words = [str(word) for word in command]
    subprocess.run(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True, timeout=timeout_s)


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def in_turns(
    first: Callable[[], object],
    second: Callable[[], object],
    pairs: int,
    *,
    timed: Callable[[Callable[[], object]], float] | None = None,
) -> np.ndarray:
    """Seconds of both, float64[pairs, 2]; which goes first changes from pair to pair."""
    seconds = np.empty((pairs, 2))
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds[pair, which] = (timed or wall_clock)((first, second)[which])
    return seconds


def wall_clock(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median_ratio(pairs: np.ndarray) -> np.ndarray:
    """Median of second / first of pairs [..., pair, 2]."""
    return np.median(pairs[..., 1] / pairs[..., 0], axis=-1)


def ratio_of_sums(pairs: np.ndarray) -> np.ndarray:
    """Sum of the first over sum of the second of pairs [..., pair, 2]."""
    sums = pairs.sum(-2)
    return sums[..., 0] / sums[..., 1]


def interval(
    pairs: np.ndarray | Sequence[tuple[float, float]], ratio: Callable[[np.ndarray], np.ndarray] = median_ratio
) -> list[float]:
    """[low, value, high] of a ratio, with 95% of its values over resampled pairs."""
    held = np.asarray(pairs, float)
    drawn = ratio(held[np.random.default_rng(7).integers(len(held), size=(DRAWS, len(held)))])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return [float(low), float(ratio(held)), float(high)]


def show_interval(found: Sequence[float]) -> str:
    """A ratio as a cell: value, and in brackets its ends."""
    low, value, high = found
    return "1" if low == high == 1 else f"{value:.3f} ({low:.3f}–{high:.3f})"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float | None, form: str = "{:,.0f}", missing: str = "–") -> str:
    """A cell."""
    return missing if value is None else form.format(value)
