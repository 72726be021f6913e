"""Connections that are lost, servers that start again, leases that end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.store import PlanKeys, StoreServer, new_job_name, open_store, redis_store
from tests.store.servers import Relay, server_pid


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def relayed(**settings: float) -> Iterator[tuple[StoreServer, Relay, str]]:
    """A server, a relay before it, and the server's URL through the relay."""
    with StoreServer() as server:
        relay = Relay(int(server.address.url.rpartition(":")[2].partition("/")[0]), **settings)
        try:
            yield server, relay, server.address.url.replace(f":{relay.to_port}/", f":{relay.port}/")
        finally:
            relay.close()


def test_a_lost_connection_is_opened_again(tmp_path: Path) -> None:
    with relayed() as (_, relay, url):
        with open_store(url, patience_s=20) as store:
            store.put("before", b"1")
            relay.cut()
            relay.is_cut = False
            store.put("after", b"2")
            assert store.wait_any(["before"], timeout_s=5, what="it")[1] == b"1"
            assert store.interruptions == 0  # the same server, with all that it held


def test_a_connection_that_is_refused_for_a_while_is_tried_again() -> None:
    with relayed() as (_, relay, url):
        with open_store(url, patience_s=20) as store:
            relay.cut()
            threading.Timer(0.4, setattr, (relay, "is_cut", False)).start()
            store.put("k", b"1")
            assert store.interruptions in (1, 2, 3)


def test_a_wait_goes_on_where_its_connection_is_lost() -> None:
    with relayed(delay_s=0.1) as (server, relay, url):
        with open_store(url, patience_s=20) as store, open_store(server.address) as near:

            def cut_then_publish() -> None:
                relay.cut()
                relay.is_cut = False
                time.sleep(0.3)
                near.put("k", b"1")

            threading.Timer(0.4, cut_then_publish).start()
            assert store.wait_any(["k"], timeout_s=20, what="it")[1] == b"1"


def test_patience_counts_from_the_last_moment_at_which_the_server_was_reached() -> None:
    """Campaign: a wait that had lost its connection once gave up at the second time, a minute later."""
    with relayed() as (server, relay, url):
        with open_store(url, patience_s=1) as store, open_store(server.address) as near:

            def cut_again_and_again_then_publish() -> None:
                for _ in range(4):
                    relay.cut()
                    time.sleep(0.3)
                    relay.is_cut = False
                    time.sleep(0.7)
                near.put("k", b"1")

            threading.Timer(0.2, cut_again_and_again_then_publish).start()
            assert store.wait_any(["k"], timeout_s=30, what="it")[1] == b"1"


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaign: a planner that was stopped while the store was away gave up as soon as it went on."""
    with relayed() as (_, relay, url):
        with open_store(url, patience_s=20) as store:
            relay.cut()
            asleep_s = iter([0.0, 0.0, 100.0])  # the clock has moved on by as much, the third time that it is read
            total_s = 0.0

            def clock() -> float:
                nonlocal total_s
                total_s += next(asleep_s, 0.0)
                return time.monotonic() + total_s

            monkeypatch.setattr(redis_store, "time", SimpleNamespace(monotonic=clock))
            threading.Timer(0.8, setattr, (relay, "is_cut", False)).start()
            store.put("k", b"1")
            assert store.interruptions >= 2
            assert total_s == 100.0


def test_a_short_wait_outlasts_a_server_that_is_stopped() -> None:
    """Campaign: planners wait in slices of seconds, and ended when the server stood still for longer than one."""
    with StoreServer() as server, open_store(server.address, patience_s=30) as store:
        process = psutil.Process(server_pid(server.address))
        process.suspend()
        threading.Timer(5.0, process.resume).start()
        with pytest.raises(StoreTimeoutError, match=r"waited 0\.5 s for it"):
            store.wait_any(["k"], timeout_s=0.5, what="it")


def test_a_server_that_stays_stopped_is_told_after_the_patience() -> None:
    with StoreServer() as server, open_store(server.address, patience_s=2, reply_timeout_s=5) as store:
        process = psutil.Process(server_pid(server.address))
        process.suspend()
        try:
            with pytest.raises(StoreError, match="does not answer"):
                store.wait_any(["k"], timeout_s=0.5, what="it")
        finally:
            process.resume()


def test_a_server_that_is_known_may_be_out_of_reach_at_first() -> None:
    with relayed() as (_, relay, url):
        relay.cut()
        with pytest.raises(StoreError, match="failed while greeting the server"):
            open_store(url, patience_s=20)
        threading.Timer(0.4, setattr, (relay, "is_cut", False)).start()
        with open_store(url, patience_s=20, is_known=True) as store:
            store.put("k", b"1")


def test_a_server_that_is_gone_for_good_is_told_after_the_patience(tmp_path: Path) -> None:
    with StoreServer() as server:
        with open_store(server.address, patience_s=0.6) as store:
            server._stop()
            with pytest.raises(StoreError, match="failed while waiting for it"):
                store.wait_any(["k"], timeout_s=60, what="it")
            assert store.interruptions in (1, 2)


def test_a_server_that_was_killed_starts_again_at_the_same_address() -> None:
    with StoreServer(restarts=1) as server, open_store(server.address, patience_s=30) as store:
        store.put("k", b"1")
        assert server._guard is not None
        server._guard.kill()
        until(lambda: not store.put_latest("other", b"") and store.interruptions)
        store.put("k", b"2")  # it came back empty
        assert store.wait_any(["k"], timeout_s=5, what="it")[1] == b"2"
        first = server._guard
        first.kill()
        first.wait()
        with pytest.raises(StoreError, match="ended with exit status"):
            server.check()


def test_leases_are_not_renewed_with_the_job() -> None:
    keys = PlanKeys(job=new_job_name(), settings_digest="s")
    with StoreServer() as server, open_store(server.address, retention_s=1000) as store:
        store.put(keys.plan(split="train", iteration=0, replica=0, stage=0), b"plan")
        assert store.claim(keys.claim("train", 0), b"0", lease_s=0.2)
        assert store.renew(keys.job) == 1
        time.sleep(0.25)
        assert store.claim(keys.claim("train", 0), b"1", lease_s=1)
