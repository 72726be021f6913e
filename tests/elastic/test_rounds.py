"""What ranks of one round have in common."""

import pytest

from megatron_dynapipe.elastic.job import Job
from megatron_dynapipe.elastic.rounds import start_of_ranks

JOB = Job(most_ranks=4, wait_s=60, emergency_every=0, exclude_slow=None, slow_file="/nowhere/slow")


def test_ranks_whose_agents_counted_different_failures_are_of_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaign: after a failure the ranks of a node that joined waited for what rank 0 had said under another key."""
    monkeypatch.setattr(Job, "current", lambda: JOB)
    names = set()
    for count in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        names.add(start_of_ranks())
    assert len(names) == 1


def test_starts_of_torchrun_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "current", lambda: None)
    names = set()
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        names.add(start_of_ranks())
    assert len(names) == 2
