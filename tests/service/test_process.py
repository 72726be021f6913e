"""The planner as a process of its own: real plans through a real server, deaths of every kind, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from megatron_dynapipe.errors import PlannerFailedError
from megatron_dynapipe.service import NodePlanners, PlanClient, PlannerProcess, ServiceSettings
from megatron_dynapipe.service.loop import PlannedSplits
from megatron_dynapipe.service.settings import encode_settings
from megatron_dynapipe.store import PlanStore, StoreServer, open_store
from tests.helpers.waiting import is_running, until

COMMAND = [sys.executable, "-m", "megatron_dynapipe.service"]


def client(store: PlanStore, settings: ServiceSettings, replica: int = 0, stage: int = 0) -> PlanClient:
    return PlanClient(store, settings.keys, replica=replica, stage=stage, deadline_s=30)


def test_plans_arrive_ahead_of_training_and_are_the_same_here(settings) -> None:
    job = settings(iterations=6)
    here = PlannedSplits(job.inputs)
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        for iteration in range(6):
            expected = {(replica, stage): data for replica, stage, data in here.entries("train", iteration)}
            entries = []
            for replica, stage in expected:
                rank = client(store, job, replica, stage)
                entries.append(rank.fetch("train", iteration))
                key = job.keys.plan(split="train", iteration=iteration, replica=replica, stage=stage)
                assert store.wait_any([key], timeout_s=60, what="it")[1] == expected[replica, stage]
            assert sum(len(mb.sample_ids) for entry in entries[::2] for mb in entry.micro_batches) == 12
            assert len({entry.plan_digest for entry in entries}) == 1
            client(store, job).announce("train", iteration)
        assert client(store, job).fetch("valid", 0).forward_only
        planner.check()


def test_it_runs_below_training_and_its_password_shows_nowhere(settings, tmp_path: Path) -> None:
    job = settings()
    password = job.store.url.partition("://:")[2].partition("@")[0]
    log = tmp_path / "planner.log"
    with PlannerProcess(job, log_path=log) as planner, open_store(job.store) as store:
        client(store, job).fetch("train", 0)
        for name in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{planner.pid}/{name}").read_bytes()
        assert os.getpriority(os.PRIO_PROCESS, planner.pid) - os.getpriority(os.PRIO_PROCESS, 0) in range(1, 11)
    text = log.read_text()
    assert "planner: train: all 200 samples are within the maximum lengths" in text
    assert password not in text


def test_a_killed_planner_is_the_error_of_ranks_that_wait(settings) -> None:
    job = settings()
    with PlannerProcess(job, restarts=0) as planner, open_store(job.store) as store:
        client(store, job).fetch("train", 2)
        errors: list[PlannerFailedError] = []

        def wait(stage: int) -> None:
            try:
                client(store, job, stage=stage).fetch("train", 99)
            except PlannerFailedError as error:
                errors.append(error)

        ranks = [threading.Thread(target=wait, args=(stage,)) for stage in range(2)]
        for rank in ranks:
            rank.start()
        time.sleep(0.2)
        os.kill(planner.pid, signal.SIGKILL)
        started = time.monotonic()
        for rank in ranks:
            rank.join(60)
        assert time.monotonic() - started < 5
        assert len(errors) == 2
        for error in errors:
            assert f"its process {planner.pid} ended with exit status -9" in error.message
            assert "planner: train: all 200 samples are within the maximum lengths" in error.message
            assert error.hint == "it was killed, often for want of memory"
        until(lambda: planner._failure is not None)
        with pytest.raises(PlannerFailedError, match="ended with exit status -9"):
            planner.check()


def test_a_planner_that_was_killed_starts_again(settings) -> None:
    job = settings()
    with PlannerProcess(job, restarts=1) as planner, open_store(job.store) as store:
        client(store, job).fetch("train", 2)
        first = planner.pid
        os.kill(first, signal.SIGKILL)
        store.announce(job.keys.progress("train"), 3)
        assert client(store, job).fetch("train", 5).iteration == 5
        assert planner.pid != first
        planner.check()
        os.kill(planner.pid, signal.SIGKILL)
        with pytest.raises(PlannerFailedError, match="ended with exit status -9"):
            client(store, job).fetch("train", 99)


def test_a_planner_that_is_stopped_gets_a_stand_in(settings, tmp_path: Path) -> None:
    job = settings()
    with NodePlanners(job, node=0, nodes=1, log_folder=tmp_path) as planners, open_store(job.store) as store:
        client(store, job).fetch("train", 2)
        (stopped,) = [
            child.pid for child in psutil.Process().children() if "megatron_dynapipe.service" in child.cmdline()
        ]
        os.kill(stopped, signal.SIGSTOP)
        store.announce(job.keys.progress("train"), 2)
        late = planners.start_stand_in
        rank = PlanClient(store, job.keys, replica=0, stage=0, deadline_s=30, late_s=0.05, on_late=late)
        assert rank.fetch("train", 3).iteration == 3
        planners.start_stand_in()  # one is enough
        assert logs_of(tmp_path) == [0, 1]
        os.kill(stopped, signal.SIGCONT)
    planners.start_stand_in()  # from a thread that comes late
    assert logs_of(tmp_path) == [0, 1]


def logs_of(folder: Path) -> list[int]:
    """Planners that were started; a log is made when its process is."""
    return sorted(int(log.stem.partition("-")[2]) for log in folder.glob("planner-*.log"))


@pytest.mark.parametrize(
    ("nodes", "planners", "by_node"), [(1, 1, [[0]]), (2, 4, [[0, 2], [1, 3]]), (3, 2, [[0], [1], []])]
)
def test_planners_are_spread_over_nodes(settings, tmp_path, nodes, planners, by_node) -> None:
    with ExitStack() as stack:
        for node in range(nodes):
            folder = tmp_path / str(node)
            folder.mkdir()
            stack.enter_context(NodePlanners(settings(planners=planners), node=node, nodes=nodes, log_folder=folder))
        assert [logs_of(tmp_path / str(node)) for node in range(nodes)] == by_node


def test_sigterm_ends_it_and_is_an_error(settings) -> None:
    job = settings()
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        client(store, job).fetch("train", 2)
        os.kill(planner.pid, signal.SIGTERM)
        with pytest.raises(PlannerFailedError, match="ended with exit status 143"):
            client(store, job).fetch("train", 99)


def test_samples_that_are_too_long_are_told_with_a_traceback(settings) -> None:
    job = settings(max_length=8)
    with PlannerProcess(job) as planner, open_store(job.store) as store:
        with pytest.raises(PlannerFailedError, match="failed while reading lengths and costs: DataError: ") as caught:
            client(store, job).fetch("train", 0)
        assert "Traceback (most recent call last):" in caught.value.message
        until(lambda: planner._failure is not None)
        with pytest.raises(PlannerFailedError, match="ended with exit status 1"):
            planner.check()


def test_a_store_that_dies_ends_the_planner(settings, data_folder: Path) -> None:
    with StoreServer() as server:
        job = settings(store=server.address)
        with PlannerProcess(job) as planner:
            with open_store(job.store) as store:
                client(store, job).fetch("train", 2)
            assert server._guard is not None
            server._guard.kill()
            until(lambda: planner._failure is not None)
            with pytest.raises(PlannerFailedError, match="StoreError: plan store redis://\\*\\*\\*@127"):
                planner.check()


def test_a_store_that_cannot_be_reached_ends_the_planner(settings, nowhere, caplog) -> None:
    with PlannerProcess(settings(store=nowhere)) as planner:
        until(lambda: planner._failure is not None)
        with pytest.raises(PlannerFailedError, match="Connection refused") as caught:
            planner.check()
        # The watcher tries to publish the failure after it has kept it: the warning comes a moment later.
        said = "the planner died, and its failure cannot be published: plan store redis://***@127.0.0.1:1/0"
        until(lambda: said in caplog.text)
        assert "hunter2" not in str(caught.value) + caplog.text


OWNER = """
    import os, sys, time
    from megatron_dynapipe.service import PlannerProcess
    from megatron_dynapipe.service.settings import decode_settings
    with PlannerProcess(decode_settings(sys.stdin.buffer.readline())) as planner:
        print(planner.pid, flush=True)
        {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "raise SystemExit(3)", "os._exit(4)"])
def test_it_is_gone_when_its_owner_is_gone(settings, then: str) -> None:
    job = settings()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER.format(then=then))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            owner.stdin.write(encode_settings(job))
            owner.stdin.flush()
            pid = int(owner.stdout.readline())
            if "sleep" in then:
                with open_store(job.store) as store:
                    client(store, job).fetch("train", 0)
                assert is_running(pid)
        finally:
            if "sleep" in then:
                owner.kill()
    until(lambda: not is_running(pid))


@pytest.mark.parametrize("stdin", [b"", b"{}\n", b"not json\n"])
def test_unusable_settings_are_refused_in_one_line(stdin: bytes) -> None:
    done = subprocess.run(COMMAND, input=stdin, capture_output=True, check=False, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(b"planner: not the planner process's settings: ")
    assert done.stderr.count(b"\n") == 1 and done.stdout == b""
