"""Connections that are lost, servers that start again, replies that no server should send."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.store import StoreServer, connection, open_store, redis_store
from tests.helpers.waiting import until
from tests.store.servers import Relay, Scripted, server_pid


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
            store.put("dynapipe:before", b"1")
            relay.cut()
            relay.is_cut = False
            store.put("dynapipe:after", b"2")
            assert store.wait_any(["dynapipe:before"], timeout_s=5, what="it")[1] == b"1"
            assert store.interruptions == 0  # the same server, with all that it held


def test_a_connection_that_is_refused_for_a_while_is_tried_again() -> None:
    with relayed() as (_, relay, url):
        with open_store(url, patience_s=20) as store:
            relay.cut()
            threading.Timer(0.4, setattr, (relay, "is_cut", False)).start()
            store.put("dynapipe:k", b"1")
            assert store.interruptions in (1, 2, 3)


def test_a_wait_goes_on_where_its_connection_is_lost() -> None:
    with relayed(delay_s=0.1) as (server, relay, url):
        with open_store(url, patience_s=20) as store, open_store(server.address) as near:

            def cut_then_publish() -> None:
                relay.cut()
                relay.is_cut = False
                time.sleep(0.3)
                near.put("dynapipe:k", b"1")

            threading.Timer(0.4, cut_then_publish).start()
            assert store.wait_any(["dynapipe:k"], timeout_s=20, what="it")[1] == b"1"


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
                near.put("dynapipe:k", b"1")

            threading.Timer(0.2, cut_again_and_again_then_publish).start()
            assert store.wait_any(["dynapipe:k"], timeout_s=30, what="it")[1] == b"1"


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

            monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=clock))
            threading.Timer(0.8, setattr, (relay, "is_cut", False)).start()
            store.put("dynapipe:k", b"1")
            assert store.interruptions >= 2
            assert total_s == 100.0


def test_a_short_wait_outlasts_a_server_that_is_stopped() -> None:
    """Campaign: planners wait in slices of seconds, and ended when the server stood still for longer than one."""
    with StoreServer() as server, open_store(server.address, patience_s=30) as store:
        process = psutil.Process(server_pid(server.address))
        process.suspend()
        threading.Timer(5.0, process.resume).start()
        with pytest.raises(StoreTimeoutError, match=r"waited 0\.5 s for it"):
            store.wait_any(["dynapipe:k"], timeout_s=0.5, what="it")


@pytest.mark.parametrize("patience_s", [0, 2])
def test_a_server_that_stays_stopped_is_an_error_after_the_patience(patience_s: float) -> None:
    with StoreServer() as server, open_store(server.address, patience_s=patience_s, reply_timeout_s=5) as store:
        process = psutil.Process(server_pid(server.address))
        process.suspend()
        try:
            with pytest.raises(StoreError, match="failed while waiting for a plan: Timeout") as caught:
                store.wait_any(["dynapipe:k"], timeout_s=0.5, what="a plan")
        finally:
            process.resume()
        assert str(caught.value.hint).startswith("the server accepts connections but does not answer")


def test_a_server_that_is_known_may_be_out_of_reach_at_first() -> None:
    with relayed() as (_, relay, url):
        relay.cut()
        with pytest.raises(StoreError, match="failed while greeting the server"):
            open_store(url, patience_s=20)
        threading.Timer(0.4, setattr, (relay, "is_cut", False)).start()
        with open_store(url, patience_s=20, is_known=True) as store:
            store.put("dynapipe:k", b"1")


def test_a_server_that_is_gone_for_good_is_an_error_after_the_patience(tmp_path: Path) -> None:
    with StoreServer() as server:
        with open_store(server.address, patience_s=0.6) as store:
            server._stop()
            with pytest.raises(StoreError, match="failed while waiting for it"):
                store.wait_any(["dynapipe:k"], timeout_s=60, what="it")
            assert store.interruptions in (1, 2)


def test_a_server_that_was_killed_starts_again_at_the_same_address() -> None:
    with StoreServer(restarts=1) as server, open_store(server.address, patience_s=30) as store:
        store.put("dynapipe:k", b"1")
        assert server._guard is not None
        server._guard.kill()
        until(lambda: not store.read_progress(["dynapipe:other"]) and store.interruptions)
        store.put("dynapipe:k", b"2")  # it came back empty
        assert store.wait_any(["dynapipe:k"], timeout_s=5, what="it")[1] == b"2"
        first = server._guard
        first.kill()
        first.wait()
        with pytest.raises(StoreError, match="ended with exit status"):
            server.check()


ENTRY = b"*1\r\n*2\r\n$1\r\nt\r\n*1\r\n*2\r\n$3\r\n7-1\r\n*2\r\n$1\r\nv\r\n$0\r\n\r\n"
"""Of the stream `t`."""


def test_a_wait_that_the_server_ends_early_goes_on() -> None:
    """Attack: a server whose clock jumped ahead ended every wait at once, and the run with it."""
    answers = iter([b"*-1\r\n", b"*-1\r\n", ENTRY])
    with Scripted(lambda: [next(answers)]) as server, open_store(server.url, reply_timeout_s=5) as store:
        assert store.wait_any(["t"], timeout_s=30, what="it") == ("t", b"")


def test_a_reply_that_comes_byte_by_byte_has_a_deadline_as_a_whole() -> None:
    """Attack: a byte each 0.7 s never timed out, since redis-py counts time per receive."""
    with Scripted([ENTRY]) as server, open_store(server.url, reply_timeout_s=0.5) as store:
        assert store.read_progress(["t"]) == {"t": 7}
    slow = Scripted([ENTRY[at : at + 1] for at in range(len(ENTRY))], pause_s=0.05)
    with slow, open_store(slow.url, reply_timeout_s=0.5) as store, pytest.raises(StoreError, match="Timeout reading"):
        store.read_progress(["t"])


def test_a_reply_larger_than_what_was_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: a value announced as 30 GB filled the memory."""
    monkeypatch.setattr(redis_store, "MAX_VALUE_BYTES", 1000)
    server = Scripted([b"$30000000000\r\n", *[bytes(1_000_000)] * 40])
    with server, open_store(server.url, reply_timeout_s=10) as store:
        with pytest.raises(StoreError, match="the reply is larger than anything that was stored"):
            store.wait_any(["dynapipe:key"], timeout_s=5, what="a plan")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"*1\r\n" * 100_000, "a reply that is nested too deeply"),
        (b"*1\r\n$" + b"9" * 5000 + b"\r\n", "failed while"),
        (b"?\r\n", "Protocol Error"),
        (b":5\r\n", "expected entries of streams while"),
        (b"*1\r\n*1\r\n+stream\r\n", "expected entries of streams while"),
        (b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n+x\r\n*2\r\n+v\r\n+w\r\n", "expected entries of streams while"),
    ],
    ids=["nested", "digits", "no protocol", "a number", "half an entry", "no number"],
)
def test_a_reply_that_is_no_servers_is_one_error(answer: bytes, said: str) -> None:
    with Scripted([answer]) as server, open_store(server.url, reply_timeout_s=10) as store:
        with pytest.raises(StoreError, match=said) as caught:
            store.read_progress(["dynapipe:topic"])
        assert "\n" not in caught.value.message and len(caught.value.message) < 1000
