"""What ranks of one round have in common."""

import pytest

from megatron_dynapipe.elastic.job import Job
from megatron_dynapipe.elastic.rounds import start_of_ranks

JOB = Job(most_ranks=4, wait_s=60, emergency_every=0, exclude_slow=None, slow_file="/nowhere/slow")


@pytest.mark.parametrize(
    ("job", "names"), [pytest.param(JOB, 1, id="launch: one start"), pytest.param(None, 2, id="torchrun: two starts")]
)
def test_counts_of_failures_tell_starts_apart_under_torchrun_alone(
    job: Job | None, names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Campaign: after a failure the ranks of a node that joined waited for what rank 0 had said under another key."""
    monkeypatch.setattr(Job, "current", lambda: job)
    found = set()
    for count in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        found.add(start_of_ranks())
    assert len(found) == names
