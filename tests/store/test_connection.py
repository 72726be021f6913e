"""Connections that are lost, servers that start again, replies that no server should send."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from megatron_dynapipe.core.errors import StoreError
from megatron_dynapipe.store import StoreServer, connection, open_store
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


def test_a_lost_connection_is_opened_again_and_a_wait_goes_on() -> None:
    with relayed(delay_s=0.05) as (server, relay, url):
        with open_store(url) as store, open_store(server.address) as near:
            store.put_all([("dynapipe:before", b"1")])
            relay.cut()
            threading.Timer(0.3, setattr, (relay, "is_cut", False)).start()
            store.put_all([("dynapipe:after", b"2")])
            assert store.wait_any(["dynapipe:before"], timeout_s=5, what="it")[1] == b"1"

            def cut_then_publish() -> None:
                relay.cut()
                relay.is_cut = False
                time.sleep(0.3)
                near.put_all([("dynapipe:k", b"1")])

            threading.Timer(0.4, cut_then_publish).start()
            assert store.wait_any(["dynapipe:k"], timeout_s=20, what="it")[1] == b"1"


def test_a_server_that_is_stopped_is_an_error_after_the_reply_s_time() -> None:
    with StoreServer() as server, open_store(server.address, reply_timeout_s=1.0) as store:
        process = psutil.Process(server_pid(server.address))
        process.suspend()
        try:
            with pytest.raises(StoreError, match="failed while waiting for a plan: Timeout") as caught:
                store.wait_any(["dynapipe:k"], timeout_s=60, what="a plan")
        finally:
            process.resume()
        assert str(caught.value.hint).startswith("the server accepts connections but does not answer")


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
    monkeypatch.setattr(connection, "_REPLY_BYTES", 16_000_000)
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
