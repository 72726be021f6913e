"""Servers of other makers and versions than a run's own.

Those on the PATH, and those whose programs DYNAPIPE_TEST_SERVERS lists, separated by colons.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_dynapipe.errors import StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.store import StoreAddress, open_store
from megatron_dynapipe.store.admin import inspect_server, stop_server
from megatron_dynapipe.store.connection import OLDEST_REDIS
from megatron_dynapipe.store.redis_store import COMMANDS
from tests.store.servers import free_port, serving
from tests.store.test_server_kinds import use

_NAMED = os.environ.get("DYNAPIPE_TEST_SERVERS", "").split(":")
_ON_PATH = (shutil.which(name) for name in ("redis-server", "valkey-server"))
PROGRAMS = [Path(program) for program in (*_NAMED, *_ON_PATH) if program]


def version_of(program: Path) -> str:
    """As in "Redis server v=7.0.15 sha=…"."""
    text = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=([0-9.]+)", text)
    assert found is not None, text
    return found[1]


def is_old(program: Path) -> bool:
    return tuple(map(int, version_of(program).split(".")[:2])) < OLDEST_REDIS


NEW = [program for program in PROGRAMS if not is_old(program)]
OLD = [program for program in PROGRAMS if is_old(program)]
WHY = "a server on the PATH or in DYNAPIPE_TEST_SERVERS"
new = pytest.mark.parametrize("program", NEW or [pytest.param(None, marks=pytest.mark.skip(f"needs {WHY}"))])
old = pytest.mark.parametrize("program", OLD or [pytest.param(None, marks=pytest.mark.skip(f"needs an old {WHY[2:]}"))])


@new
def test_it_serves_a_user_with_the_documented_commands(tmp_path: Path, program: Path) -> None:
    port = free_port()
    users = f"user default off\nuser plans on >p ~dynapipe:* {COMMANDS}"
    with serving(tmp_path, f"port {port}\n{users}", port=port, program=program):
        use(f"redis://plans:p@127.0.0.1:{port}/0")


@new
def test_waits_end_in_time_and_what_it_forgot_is_noticed(tmp_path: Path, program: Path) -> None:
    port = free_port()
    with serving(tmp_path, f"port {port}", port=port, program=program):
        store = open_store(f"redis://127.0.0.1:{port}", patience_s=20)
        store.put("dynapipe:key", b"1")
        assert store.wait_any(["dynapipe:key"], timeout_s=5, what="it") == ("dynapipe:key", b"1")
        with pytest.raises(StoreTimeoutError):
            store.wait_any(["dynapipe:none"], timeout_s=0.1, what="it")
    with serving(tmp_path, f"port {port}", port=port, program=program):
        assert store.read_progress(["dynapipe:key"]) == {}
        assert store.interruptions
        store.close()


@new
def test_its_memory_limit_is_an_error_of_its_own(tmp_path: Path, program: Path) -> None:
    port = free_port()
    settings = f"port {port}\nmaxmemory 4mb\nmaxmemory-policy noeviction"
    with serving(tmp_path, settings, port=port, program=program):
        with open_store(f"redis://127.0.0.1:{port}") as store, pytest.raises(StoreFullError):
            store.put_all([(f"dynapipe:{number}", bytes(100_000)) for number in range(100)])


@new
def test_it_is_inspected_and_stopped(tmp_path: Path, program: Path) -> None:
    port = free_port()
    address = StoreAddress(f"redis://127.0.0.1:{port}/0")
    with serving(tmp_path, f"port {port}", port=port, program=program) as server:
        assert inspect_server(address).server.partition(" ")[0] in ("Redis", "Valkey")
        stop_server(address)
        server.wait(20)


@old
def test_one_that_is_too_old_is_refused_when_it_is_connected_to(tmp_path: Path, program: Path) -> None:
    port = free_port()
    with serving(tmp_path, f"port {port}", port=port, program=program):
        said = f"expected Redis 6.2 or newer, or Valkey, at redis://127.0.0.1:{port}, got Redis {version_of(program)}"
        with pytest.raises(StoreError, match=re.escape(said)) as caught:
            open_store(f"redis://127.0.0.1:{port}")
        assert caught.value.hint == "a run without a store's URL starts a server of its own"
