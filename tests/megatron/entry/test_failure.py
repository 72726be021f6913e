"""A rank that fails says so at once, though a receive is pending; its peers name it."""

import contextlib
import io
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dynapipe import outputs
from megatron_dynapipe.core.errors import CheckpointError, ConfigError, ExecutionError
from megatron_dynapipe.megatron.entry import bootstrap, failure, leaving
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER
from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import in_ranks, run_ranks


@in_ranks(2, deadline_s=60)
def test_the_error_is_printed_and_the_peers_name_the_rank(rank):
    from megatron_dynapipe.megatron.entry.failure import process_groups

    def fail() -> None:
        if rank == 1:
            pending = dist.irecv(torch.zeros(1), 0)  # noqa: F841  (it must live)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        dist.recv(torch.zeros(1), 1)  # which never comes

    dist.init_process_group("gloo", init_method="env://")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit, match=r"^1$"), process_groups():
        fail()
    said = errors.getvalue()
    assert f"[rank {rank}] Traceback" in said and not dist.is_initialized()
    if rank == 1:
        assert "Tried to allocate 2 GiB" in said and "failed first" not in said
    else:
        named = "rank 1 failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
        assert said.rstrip().endswith(named)


ALONE = {"kill": None, "pictures": False}
IN_OUR_WORDS = [
    # an error of Megatron's or gloo's, ours for it, its message, how its hint begins
    (
        AssertionError(  # as 0.18 and 0.19 have it: its words run together
            "OptimizerParamScheduler: class input value 160 and checkpointvalue 80 for total number of iterations do"
            " not match"
        ),
        *(ConfigError, "expected the checkpoint's total number of samples, 80, got 160"),
        "--override-opt-param-scheduler trains on with the values",
    ),
    (
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation"),
        *(ExecutionError, "waited 15 s for another rank, which still runs but does not answer"),
        "look for a process that is stopped",
    ),
    (
        RuntimeError("Missing keys: {'decoder.layers.mlp.router.expert_shares'}"),
        *(ConfigError, "the checkpoint has no shares of experts, from which aux_loss begins: it was saved without"),
        "--dist-ckpt-strictness log_unexpected",
    ),
    (
        RuntimeError("Missing key in checkpoint state_dict: decoder.final_layernorm._extra_state/shard_0_1."),
        *(ConfigError, "the checkpoint lacks states of Transformer Engine's layers: it was saved with local ones"),
        "--dist-ckpt-strictness log_unexpected",
    ),
]


@pytest.mark.parametrize(("error", "ours", "message", "hint"), IN_OUR_WORDS, ids=range(4))
def test_an_error_that_has_a_way_out_is_said_in_our_words(error, ours, message, hint):
    error.add_note("at stage 0, step 15: --> WAIT_RECV_B1<1 <--")
    told = failure._explained(error)
    assert isinstance(told, ours) and told.__cause__ is error
    assert told.message.startswith(message) and told.hint.startswith(hint)
    assert ours is ConfigError or told.__notes__ == error.__notes__
    other = AssertionError("something else")
    assert failure._explained(other) is other


def run_with_a_stopped_rank(rank: int, world_size: int, argv: list[str], pid_file: str) -> dict[str, object]:
    """Rank 1 stops where Megatron agrees, outside of any list; rank 0 lets it go on once it has failed."""
    from megatron.core.rerun_state_machine import RerunStateMachine

    agree, calls = RerunStateMachine._reduce_any, itertools.count()

    def stopping(machine: object, value: object) -> object:
        if rank == 1 and next(calls) == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return agree(machine, value)

    RerunStateMachine._reduce_any = stopping
    if rank == 1:
        Path(pid_file).write_text(str(os.getpid()))
    errors, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        status = run_script(script_of("gpt"), argv)
    if rank == 0:
        os.kill(int(Path(pid_file).read_text()), signal.SIGCONT)
    return {"status": status, "stderr": errors.getvalue(), "seconds": time.monotonic() - began}


def test_a_rank_that_is_stopped_is_named_within_the_deadline(data, tmp_path):
    argv = words("gpt", data, "--train-iters 9 --rerun-mode validate_results", report=tmp_path / "report")
    argv[argv.index("--dynapipe-timeout-s") + 1] = "4"
    waiting, _ = run_ranks(run_with_a_stopped_rank, 2, {"argv": argv, "pid_file": str(tmp_path / "pid")})
    assert waiting["status"] == 1
    told = "[rank 0] error: waited 4 s for another rank, which still runs but does not answer; no answer from rank 1"
    assert told in waiting["stderr"]


def run_short_of_memory(rank: int, world_size: int, argv: list[str]) -> dict[str, object]:
    """In its second iteration rank 1 asks the system for more memory than there is."""
    from megatron_dynapipe.megatron.execution import iterations

    run, calls = iterations.run_iteration, itertools.count()

    def asking(runner: object, plan: object, models: object, step: object, load: object, **named: object) -> object:
        too_large = rank == 1 and next(calls) == 1
        return run(runner, plan, models, step, (lambda _: torch.empty(1 << 48)) if too_large else load, **named)

    iterations.run_iteration = asking
    return entry_scripts.run_entry(rank=rank, world_size=world_size, script=script_of("gpt"), argv=argv, **ALONE)


def test_a_rank_out_of_memory_says_what_plans_counted_on(data, tmp_path):
    argv = words("gpt", data, "--train-iters 4", report=tmp_path / "report")
    other, short = run_ranks(run_short_of_memory, 2, {"argv": argv})
    assert (other["status"], short["status"]) == (1, 1)
    assert "[rank 1] error: the device is out of memory; plans may use " in short["stderr"]
    assert "--dynapipe-device-memory-limit" in short["stderr"] and "--> LOAD0 <--" in short["stderr"]
    assert "rank 1 failed first: ExecutionError: the device is out of memory" in other["stderr"]


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    """Of Megatron's writer, torch's archives and the system; what is raised elsewhere stays as it is."""

    def save_checkpoint(error: BaseException) -> BaseException:
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001  (of every type given)
            return failure._explained(raised)

    monkeypatch.setattr(failure.sys, "argv", ["script", "--save", str(tmp_path / "saved")])
    full = OSError(28, "No space left on device")
    archive = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    rows = [
        (full, "No space left on device"),
        (CheckpointException("write", {1: (archive, [])}), archive.args[0]),
        (CheckpointException("write", {}), "another rank could not write its share"),
        (archive, archive.args[0]),
    ]
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
    assert "No space left on device (" in save_checkpoint(archive).message
    monkeypatch.undo()
    monkeypatch.setattr(failure.sys, "argv", ["script", "--save", str(tmp_path / "saved")])
    for error, reason in rows:
        told = save_checkpoint(error)
        assert isinstance(told, CheckpointError) and told.__cause__ is error
        assert told.message == f"cannot write the checkpoint {tmp_path}/saved: {reason}"
        assert f"{tmp_path} has " in told.hint and " MB free; checkpoints that were complete are as" in told.hint
        assert failure._explained(error.with_traceback(None)) is error
    assert isinstance(save_checkpoint(RuntimeError("of something else")), RuntimeError)


def test_a_loss_that_is_no_number_needs_no_folder(data, tmp_path):
    """Megatron ends such a run with a checkpoint, for which it had no folder."""
    argv = words("gpt", data, "--train-iters 9 --lr 1e30", report=tmp_path / "report")
    (ran,) = run_ranks(entry_scripts.run_entry, 1, {"script": script_of("gpt"), "argv": argv, **ALONE}, deadline_s=240)
    assert ran["status"] == 1
    assert "error: Megatron has found a loss or a gradient that is no number" in ran["stderr"]
    assert "TypeError" not in ran["stderr"]


def fail_alike(rank: int, world_size: int) -> str:
    """All ranks have one error, agreed on, as a planner's; what this one prints."""
    dist.init_process_group("gloo", init_method="env://")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        with bootstrap.reported():
            error = ExecutionError("the planner ended", hint="see planner.log")
            error.add_note("its traceback")
            raise error
    dist.barrier()
    dist.destroy_process_group()
    return errors.getvalue()


def test_a_hint_that_all_ranks_have_is_printed_once():
    said = run_ranks(fail_alike, 3)
    assert sorted(text.splitlines()[0] for text in said) == [f"[rank {n}] error: the planner ended" for n in range(3)]
    assert "".join(said).count("hint: see planner.log\nits traceback\n") == 1
    assert sorted(text.count("\n") for text in said) == [1, 1, 3]


def leave_while_torchrun_ends_the_job(rank: int, world_size: int) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    leaving.leave_report_to_another_rank(2)


def test_a_rank_that_leaves_the_report_to_another_ends_well_on_torchruns_signal():
    """Its summary would list it beside the rank with the message."""
    process = multiprocessing.get_context("spawn").Process(target=leave_while_torchrun_ends_the_job, args=(0, 1))
    process.start()
    process.join(200)
    assert process.exitcode == 0


def test_a_process_of_torchrun_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(failure.os, "_exit", left.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    failure.leave(1)
    assert left == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    helper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    helper.start()
    failure.leave(1)
    assert left == [1]
    helper.join(30)
    assert helper.exitcode == -signal.SIGKILL, "a process that this one has started does not stay"


ENDS = [
    # an error, the exit status, what is said
    (None, 0, ""),
    (ConfigError("expected b, got a"), 2, "error: expected b, got a\n"),
    (ExecutionError("expected c"), 1, "[rank 0] error: expected c\n"),
    (SystemExit(7), 7, ""),
    (KeyboardInterrupt(), 130, "interrupted; the last checkpoint is of iteration 40: --load {saved} goes on from it\n"),
]


@in_ranks(1)
def test_how_a_run_ends(tmp_path):
    from megatron_dynapipe.megatron.entry.failure import process_groups

    (tmp_path / TRACKER).write_text("40")
    sys.argv = ["script", "--save", str(tmp_path)]
    for error, expected, said in ENDS:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        status = 0
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                with process_groups():
                    if error is not None:
                        raise error
            except SystemExit as end:
                status = end.code
        assert (status, errors.getvalue()) == (expected, said.format(saved=tmp_path))
        assert not dist.is_initialized()
