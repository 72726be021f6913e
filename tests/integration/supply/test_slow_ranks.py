"""Which ranks are slow, from what their passes took and should have taken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dynapipe.elastic.job import Job
from megatron_dynapipe.integration.supply.slow_ranks import SlowRanks, slow_ranks
from megatron_dynapipe.plan.instructions import Backward, Forward, Load
from megatron_dynapipe.plan.timeline import Event

CASES: dict[str, tuple[list[float], float, dict[int, float]]] = {
    "all alike": ([1.0, 1.1, 0.9, 1.0], 1.5, {}),
    "one": ([1.0, 1.0, 3.0, 1.0], 1.5, {2: 3.0}),
    "one of two": ([1.0, 2.0], 1.5, {1: 2.0}),
    "wrong costs for all": ([7.0, 7.0, 7.0], 1.5, {}),
    "two of five": ([1.0, 2.0, 1.0, 2.0, 1.0], 1.5, {1: 2.0, 3: 2.0}),
    "alone": ([3.0], 1.5, {}),
    "a rank without passes": ([0.0, 1.0, 1.0], 1.5, {}),
    "below the factor": ([1.0, 1.0, 1.9], 2.0, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_slow_against_the_median_of_the_others(case: str) -> None:
    slowness, factor, expected = CASES[case]
    assert slow_ranks(slowness, factor) == pytest.approx(expected)


class Ranks:
    """A control group whose other ranks gather given values."""

    def __init__(self, rank: int, others: list[float]) -> None:
        self.rank, self._others = rank, others
        self.gathered: list[float] = []

    def start_gather(self, values: torch.Tensor) -> Any:
        self.gathered.append(float(values))
        found = [torch.tensor([value]) for value in self._others]
        found.insert(self.rank, values)
        return lambda: found


def iteration(predicted_ns: int, measured_ns: int) -> tuple[Any, Any]:
    """An item and a trace whose two passes take so long together, besides a long load."""

    def events(total: int) -> list[Event]:
        return [
            Event(Load(micro_batch=0), 0, 10**9),
            Event(Forward(micro_batch=0), 10**9, 10**9 + total // 4),
            Event(Backward(micro_batch=0), 2 * 10**9, 2 * 10**9 + total - total // 4),
        ]

    plan = SimpleNamespace(predicted=events(predicted_ns))
    item = SimpleNamespace(entry=SimpleNamespace(stage_plan=plan))
    return item, SimpleNamespace(events=lambda: events(measured_ns))


def job(folder: Path, factor: float | None) -> Job:
    return Job(most_ranks=2, wait_s=1, emergency_every=0, exclude_slow=factor, slow_file=str(folder / "slow"))


def test_a_slow_rank_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(0, [4.0, 1.0])
    watch = SlowRanks(ranks, job(tmp_path, None), window=2)  # type: ignore[arg-type]
    for _ in range(8):
        watch.add(*iteration(1000, 1200))
    assert ranks.gathered == pytest.approx([1.2, 1.2, 1.2])
    assert capsys.readouterr().out == "slow ranks: rank 1 takes 3.6 of the median time for its passes\n"
    assert not list(tmp_path.iterdir()), "without --exclude-slow no agent is told"


def test_the_agent_of_a_slow_rank_is_told_and_told_again_when_it_no_longer_is(tmp_path: Path) -> None:
    watch = SlowRanks(Ranks(1, [1.0]), job(tmp_path, 2.0), window=1)  # type: ignore[arg-type]
    for _ in range(3):
        watch.add(*iteration(1000, 2500))
    assert (tmp_path / "slow").read_text() == "rank 1 takes 2.5 of the median time"
    for _ in range(3):
        watch.add(*iteration(1000, 1000))
    assert not (tmp_path / "slow").exists()
