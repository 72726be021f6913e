"""The long mixtures of the benchmark of teams are what it says."""

import pytest

from benchmarks.planning.teams import TAILS, mixture, settings


@pytest.mark.parametrize("tail", TAILS)
def test_a_batch_has_its_tail(tail: str) -> None:
    share, least, most = TAILS[tail]
    lengths = mixture(tail, 256, 3).input_lengths - 1
    long = lengths[lengths >= 8192]
    assert len(lengths) == 256 and len(long) == (max(round(256 * share), 1) if share else 0)
    assert all(least <= length <= most for length in long)


def test_a_run_fills_its_devices() -> None:
    run = settings(16, 2, 2)
    assert (run.data_parallel, run.sequence_parallel, run.context_teams) == (16, True, 1)
