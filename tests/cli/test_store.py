"""`store start`, `stop` and `inspect`, each in a process of its own or against a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.service.client import PlannerFailure
from megatron_dynapipe.store.address import PlanKeys, StoreAddress
from megatron_dynapipe.store.admin import inspect_server
from megatron_dynapipe.store.redis_store import open_store
from tests.helpers.waiting import until

KEYS = PlanKeys(job="job", settings_digest="s")


@pytest.fixture
def started() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `store start` of its own process, and the URL it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_dynapipe", "store", "start", "--memory-limit-mb", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=120)


def test_inspect_says_what_is_held_and_what_went_wrong(started, capsys):
    _, url = started
    failure = PlannerFailure(planner=0, doing="planning iteration 5 of train", error="E: no", hint="try", details="…")
    with open_store(url) as store:
        store.announce(KEYS.progress("train"), 3)
        store.put(KEYS.plan(split="train", iteration=3, replica=0, stage=0), b"plan")
        store.put(KEYS.plan(split="train", iteration=4, replica=0, stage=0), b"plan")
        assert main.main(["store", "inspect", url]) == 0
        out = capsys.readouterr().out
        assert "job job: 2 plans\n    train: at iteration 3, plans of iterations 3-4, 1 ahead\n" in out
        assert str(StoreAddress(url)) in out and url not in out
        store.put_first(KEYS.error, failure.encode())
        assert main.main(["store", "inspect", url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["format"], found["memory_limit_bytes"]) == ("dynapipe-store-report/1", 64_000_000)
        assert found["server"].startswith("Valkey") and found["other_keys"] == 0
        error = "planner 0 failed while planning iteration 5 of train: E: no (hint: try)"
        job = {"job": "job", "plans": 2, "iterations": {"train": [3, 4]}, "training": {"train": 3}, "error": error}
        assert found["jobs"] == [job]
        assert main.main(["store", "inspect", url]) == 0
        assert error in capsys.readouterr().out


def test_a_server_is_stopped_once_no_job_uses_it(started, capsys):
    process, url = started
    with open_store(url) as store:
        store.announce(KEYS.progress("train"), 3)
        assert inspect_server(StoreAddress(url)).clients == 1
        assert main.main(["store", "stop", url]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: expected no job that uses the server at redis://***@127") and "--force" in said
        assert "it has 1 clients and holds plans of job" in said
        store.announce(KEYS.progress("train"), 4)
    until(lambda: not inspect_server(StoreAddress(url)).clients)
    assert main.main(["store", "stop", url]) == 0  # the job's keys have not expired yet
    assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_start_leaves_no_server(started, capsys, number):
    process, url = started
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.splitlines()[-1] == "stopped"
    assert url not in err
    assert main.main(["store", "inspect", url]) == 2
    assert capsys.readouterr().err.startswith("error: plan store redis://***@127.0.0.1:")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["start", "--memory-limit-mb", "0"], "--memory-limit-mb must be positive, got 0"),
        (["start", "--bind", "0.0.0.0"], "bind must be one address of this machine, got '0.0.0.0'"),
        (["inspect", "nonsense"], "the plan store's URL must be"),
        (["stop"], "expected the URL of a plan store, got none"),
    ],
)
def test_bad_input_is_one_error(capsys: pytest.CaptureFixture[str], argv: list[str], error: str) -> None:
    assert main.main(["store", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_the_url_can_be_kept_out_of_ps(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:" + "x" * 32 + "@127.0.0.1:1/0\n")  # of an earlier start
    command = [sys.executable, "-m", "megatron_dynapipe", "store", "start", "--url-file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "serving plans at redis://***@" in process.stderr.readline()
        assert file.stat().st_mode & 0o777 == 0o600
        assert main.main(["store", "inspect", "--url-file", str(file)]) == 0
        monkeypatch.setenv("DYNAPIPE_STORE_URL", file.read_text().strip())
        assert main.main(["store", "stop"]) == 0
        assert process.wait(120) == 0
        assert process.stdout.read() == ""
    monkeypatch.delenv("DYNAPIPE_STORE_URL")
    assert main.main(["store", "stop"]) == 2
    assert "expected the URL of a plan store, got none" in capsys.readouterr().err
