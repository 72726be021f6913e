"""What ranks agree on over the agent's store, before any process group."""

import os
from typing import Any

import pytest
from megatron_dynapipe.elastic.job import Job, from_rank_0, says_first, start_of_ranks

from megatron_dynapipe.errors import CostModelError, DynaPipeError
from tests.helpers.processes import run_ranks


@pytest.mark.parametrize(
    ("job", "names"),
    [
        pytest.param(Job(most_ranks=4, wait_s=60), 1, id="launch: one start"),
        pytest.param(None, 2, id="torchrun: two starts"),
    ],
)
def test_counts_of_failures_tell_starts_apart_under_torchrun_alone(
    job: Job | None, names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Campaign: after a failure the ranks of a node that joined waited for what rank 0 had set under another key."""
    monkeypatch.setattr(Job, "current", lambda: job)
    found = set()
    for count in ("0", "3"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        found.add(start_of_ranks())
    assert len(found) == names


def agreed(rank: int, world_size: int) -> list[Any]:
    """A text of rank 0's, two errors of its, a rank 0 that is too late, and who says a text first."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    found: list[Any] = [from_rank_0("text", lambda: f"of {rank}", timeout_s=60)]

    def fail(error: Exception) -> str:
        raise error

    for number, error in enumerate([CostModelError("no costs", hint="measure"), ZeroDivisionError("by zero")]):
        try:
            from_rank_0(f"error {number}", lambda error=error: fail(error), timeout_s=60)
        except (DynaPipeError, ZeroDivisionError) as caught:
            found.append((type(caught).__name__, str(caught)))
    if rank == 1:
        with pytest.raises(DynaPipeError, match="waited 1 s for rank 0's nothing"):
            from_rank_0("nothing", str, timeout_s=1)
    return [*found, says_first("what all say")]


def test_rank_0_makes_a_text_for_all_and_its_error_is_that_of_all() -> None:
    first, second = run_ranks(agreed, 2)
    assert first[0] == second[0] == "of 0"
    assert first[1] == ("CostModelError", "no costs\nhint: measure")
    assert second[1] == ("ConfigError", "no costs\nhint: measure")
    assert first[2] == ("ZeroDivisionError", "by zero")
    assert second[2] == ("ConfigError", "rank 0 failed: ZeroDivisionError: by zero")
    assert {first[3], second[3]} == {True, False}
