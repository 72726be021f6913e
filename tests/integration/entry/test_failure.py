"""A rank that fails says so at once, though a receive is pending; its peers name it."""

import contextlib
import io
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.integration.entry import failure
from tests.helpers.processes import run_ranks


def fail_with_a_receive_pending(rank: int, world_size: int) -> dict[str, object]:
    from megatron_dynapipe.integration.entry.failure import process_groups

    dist.init_process_group("gloo", init_method="env://")
    errors, status = io.StringIO(), None
    began = time.monotonic()
    with contextlib.redirect_stderr(errors):
        try:
            with process_groups():
                if rank == 1:
                    pending = dist.irecv(torch.zeros(1), 0)  # noqa: F841
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
                dist.recv(torch.zeros(1), 1)  # which never comes
        except SystemExit as leaving:
            status = leaving.code
    took = time.monotonic() - began
    return {"status": status, "stderr": errors.getvalue(), "seconds": took, "groups": dist.is_initialized()}


def test_the_error_is_printed_and_the_peers_name_the_rank():
    first, failed = run_ranks(fail_with_a_receive_pending, 2, deadline_s=60)
    assert failed["status"] == first["status"] == 1
    assert "[rank 1] Traceback" in failed["stderr"] and "Tried to allocate 2 GiB" in failed["stderr"]
    assert "failed first" not in failed["stderr"]
    assert "[rank 0] Traceback" in first["stderr"]
    named = "rank 1 failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert first["stderr"].rstrip().endswith(named)
    assert not first["groups"] and not failed["groups"]


def test_a_process_of_torchrun_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(failure.os, "_exit", left.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    failure.leave(1)
    assert left == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    failure.leave(1)
    assert left == [1]


def end_well(rank: int, world_size: int, error: str) -> dict[str, object]:
    from megatron_dynapipe.errors import ConfigError, ExecutionError
    from megatron_dynapipe.integration.entry.failure import process_groups

    dist.init_process_group("gloo", init_method="env://")
    kinds = {
        "config": ConfigError("expected b, got a"),
        "execution": ExecutionError("expected c"),
        "exit": SystemExit(7),
    }
    errors, status = io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            with process_groups():
                if error in kinds:
                    raise kinds[error]
        except SystemExit as leaving:
            status = leaving.code
    return {"status": status, "stderr": errors.getvalue(), "groups": dist.is_initialized()}


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("none", 0, ""),
        ("config", 2, "error: expected b, got a\n"),
        ("execution", 1, "[rank 0] error: expected c\n"),
        ("exit", 7, ""),
    ],
)
def test_how_a_run_ends(error, status, said):
    (run,) = run_ranks(end_well, 1, {"error": error})
    assert run == {"status": status, "stderr": said, "groups": False}
