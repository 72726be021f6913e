"""`store start`, `stop` and `inspect`, each in a process of its own or against a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.service.figures import PlannerFigures
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.keys import PlanKeys
from megatron_dynapipe.store.redis_store import open_store

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


def test_inspect_says_what_is_held(
    started: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = started
    with open_store(url) as store:
        store.put(KEYS.plan(split="train", iteration=3, replica=0, stage=0), b"plan")
        store.put(KEYS.plan(split="train", iteration=4, replica=0, stage=0), b"plan")
        store.put_first(KEYS.error, b"failure")
        assert main.main(["store", "inspect", url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["format"] == "dynapipe-store-report/1"
        assert told["memory_limit_bytes"] == 64_000_000
        assert told["jobs"] == [{"job": "job", "plans": 2, "iterations": {"train": [3, 4]}, "failed": True}]
        assert main.main(["store", "inspect", url]) == 0
    out = capsys.readouterr().out
    assert "job job: 2 plans (train 3-4), its planner failed" in out
    assert StoreAddress(url).redacted in out
    assert url not in out


def test_status_says_what_planners_do(
    started: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = started
    with open_store(url) as store:
        store.put_latest(KEYS.figures(1), msgspec.json.encode(PlannerFigures(planner=1, planned=7, taken_over=2)))
        store.put_latest(KEYS.figures(2), b"of another version")
        assert main.main(["store", "status", url]) == 0
        out = capsys.readouterr().out
        assert "  job job, planner 1: 7 iterations planned" in out and "2 taken over" in out
        assert "planner 2" not in out and url not in out
        assert main.main(["store", "status", url, "--openmetrics"]) == 0
        out = capsys.readouterr().out
        assert 'dynapipe_planner_iterations_total{job="job",planner="1"} 7\n' in out and out.endswith("# EOF\n")
        assert main.main(["store", "status", url, "--every", "0"]) == 2


def test_status_goes_on_until_it_is_interrupted(started: tuple[subprocess.Popen[str], str]) -> None:
    _, url = started
    words = [sys.executable, "-m", "megatron_dynapipe", "store", "status", url, "--every", "0.1"]
    sigint = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=sigint) as status:
        assert status.stdout is not None
        assert ["jobs" in status.stdout.readline() for _ in range(3)] == [True] * 3
        status.send_signal(signal.SIGINT)
        assert status.wait(120) == 0


def test_stop_ends_the_server_and_the_command_that_started_it(started: tuple[subprocess.Popen[str], str]) -> None:
    process, url = started
    assert main.main(["store", "stop", url]) == 0
    assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_start_leaves_no_server(
    started: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
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
    words = [sys.executable, "-m", "megatron_dynapipe", "store", "start", "--url-file", str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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
