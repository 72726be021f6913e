"""The planner as a process of its own: real plans through a real server, deaths of every kind, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.core.errors import PlannerFailedError, StoreTimeoutError
from megatron_dynapipe.service import PlanInputs, PlannerProcess, ServiceSettings
from megatron_dynapipe.service.failure import decode_failure
from megatron_dynapipe.service.planned_splits import PlannedSplits
from megatron_dynapipe.service.settings import encode_settings
from megatron_dynapipe.store import Store, StoreServer, open_store
from megatron_dynapipe.store.codec import decode_entry
from megatron_dynapipe.store.entry import StageEntry
from tests.helpers.waiting import is_running, until

COMMAND = [sys.executable, "-m", "megatron_dynapipe.service"]


def fetched(store: Store, job: ServiceSettings, split: str, iteration: int) -> StageEntry:
    """The entry of the first replica's first stage."""
    key = job.keys.plan(split=split, iteration=iteration, replica=0, stage=0)
    name, data = store.wait_any([key, job.keys.error], timeout_s=30, what="it")
    if name != key:
        raise decode_failure(data)
    return decode_entry(data)


def test_plans_arrive_ahead_of_training_and_are_the_same_here(settings) -> None:
    job = settings(iterations=6)
    here = PlannedSplits(job.inputs)
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        for iteration in range(6):
            for replica, stage, data in here.entries("train", iteration):
                key = job.keys.plan(split="train", iteration=iteration, replica=replica, stage=stage)
                assert store.wait_any([key], timeout_s=60, what="it")[1] == data
            store.announce(job.keys.progress("train"), iteration)
        assert fetched(store, job, "valid", 0).forward_only
        assert planner.status is None


def test_its_load_is_known_while_it_runs_and_after_it_has_ended(settings) -> None:
    job = settings(iterations=2, cores=2, look_ahead=100, retention_s=None)
    with PlannerProcess(msgspec.structs.replace(job, inputs=only_training(job))) as planner:
        until(lambda: float(planner.load.removesuffix(" of 2 cores")) > 0)
        until(lambda: planner.status == 0)
        taken_s = planner._processor_s
        assert taken_s >= 0.1, "the interpreter alone takes longer"
        assert float(planner.load.split()[0]) <= 2 and planner._processor_s == taken_s


def only_training(job: ServiceSettings) -> PlanInputs:
    return msgspec.structs.replace(job.inputs, splits=job.inputs.splits[:1])


def test_it_runs_below_training_and_its_password_shows_nowhere(settings, tmp_path: Path) -> None:
    job = settings()
    password = job.store.url.partition("://:")[2].partition("@")[0]
    log = tmp_path / "planner.log"
    with PlannerProcess(job, log_path=log) as planner, open_store(job.store) as store:
        fetched(store, job, "train", 0)
        for name in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{planner._process.pid}/{name}").read_bytes()
        nice, here = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (planner._process.pid, 0))
        assert nice - here in range(1, 11)
    text = log.read_text()
    assert "planner: train: all 200 samples are within the maximum lengths" in text
    assert password not in text


@pytest.mark.parametrize("iterations", [None, 4], ids=["in mid-run", "all planned"])
def test_a_clean_end_deletes_its_plans_and_no_end_is_an_error_of_the_run(settings, iterations) -> None:
    job = settings(iterations=iterations)
    job = msgspec.structs.replace(job, inputs=only_training(job))
    with open_store(job.store) as store:
        with PlannerProcess(job) as planner:
            fetched(store, job, "train", 2)
            store.announce(job.keys.progress("train"), 0 if iterations is None else iterations - 1)
            if iterations is not None:  # as in the last iterations of training, of which all are planned
                fetched(store, job, "train", iterations - 1)
                time.sleep(2)
                assert planner.status is None
        keys = [
            job.keys.plan(split="train", iteration=iteration, replica=replica, stage=stage)
            for iteration in range(8)
            for replica in range(2)
            for stage in range(2)
        ]
        assert store.read_progress([*keys, job.keys.progress("train")]) == {}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_planner_that_is_killed_has_a_status_and_publishes_nothing(settings, number, status) -> None:
    job = settings()
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        fetched(store, job, "train", 2)
        os.kill(planner._process.pid, number)
        until(lambda: planner.status == status)
        with pytest.raises(StoreTimeoutError):
            store.wait_any([job.keys.error], timeout_s=0.2, what="an error")


def test_samples_that_are_too_long_are_told_with_a_traceback(settings) -> None:
    job = settings(max_length=8)
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        with pytest.raises(PlannerFailedError, match="failed while reading lengths and costs: DataError: ") as caught:
            fetched(store, job, "train", 0)
        assert "Traceback (most recent call last):" in caught.value.message
        until(lambda: planner.status == 1)


def test_a_store_that_is_gone_leaves_the_planner_waiting_and_said(settings) -> None:
    with StoreServer() as server:
        job = settings(store=server.address)
        with PlannerProcess(job) as planner:
            with open_store(job.store) as store:
                fetched(store, job, "train", 2)
            assert server._guard is not None
            server._guard.kill()
            until(lambda: "planner: plan store redis://***@127" in planner._log.tail(40))
            assert planner.status is None


def test_a_store_that_cannot_be_reached_ends_the_planner(settings, nowhere) -> None:
    with PlannerProcess(settings(store=nowhere)) as planner:
        until(lambda: planner.status == 1)
        assert "Connection refused" in planner._log.tail(40) and "hunter2" not in planner._log.tail(40)


OWNER = """
    import os, sys, time
    from megatron_dynapipe.service import PlannerProcess
    from megatron_dynapipe.service.settings import decode_settings
    with PlannerProcess(decode_settings(sys.stdin.buffer.readline())) as planner:
        print(planner._process.pid, flush=True)
        {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "raise SystemExit(3)"], ids=["killed", "left"])
def test_it_is_gone_when_its_owner_is_gone(settings, then: str) -> None:
    job = settings()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER.format(then=then))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            owner.stdin.write(encode_settings(job))
            owner.stdin.flush()
            pid = int(owner.stdout.readline())
            if "sleep" in then:
                with open_store(job.store) as store:
                    fetched(store, job, "train", 0)
                assert is_running(pid)
        finally:
            if "sleep" in then:
                owner.kill()
    until(lambda: not is_running(pid))


def test_unusable_settings_are_refused_in_one_line() -> None:
    done = subprocess.run(COMMAND, input=b"{}\n", capture_output=True, check=False, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(b"planner: not the planner process's settings: ")
    assert done.stderr.count(b"\n") == 1 and done.stdout == b""
