"""What ranks have told, told again to a store that has come back empty."""

import time

from megatron_dynapipe.service.republish import Republisher
from megatron_dynapipe.store import MemoryStore, StoreServer, open_store


def test_nothing_is_told_again_while_the_store_is_there() -> None:
    told = Republisher(MemoryStore(), "topic")
    told.keep("key", b"value")
    assert told.restore() == 0


def test_a_store_that_was_out_of_reach_is_told_everything_once() -> None:
    store = MemoryStore()
    told = Republisher(store, "topic")
    told.keep("old", b"forgotten")
    told.forget("old")
    told.keep("key", b"value")
    told.keep_progress("topic", 3)
    told.keep_progress("topic", 4)
    store.interruptions += 1
    assert told.restore() == 2
    assert told.restore() == 0
    assert store.read_progress(["topic"]) == {"topic": 4}
    assert store.wait_any(["key"], timeout_s=30, what="it") == ("key", b"value")


def test_a_rank_that_asks_for_nothing_learns_that_its_server_has_started_again() -> None:
    with StoreServer(restarts=1) as server, open_store(server.address, patience_s=30) as store:
        store.put("key", b"value")
        store.announce("topic", 4)
        with Republisher(store, "topic", interval_s=0.1) as told, open_store(server.address, patience_s=30) as near:
            told.keep("key", b"value")
            told.keep_progress("topic", 4)
            assert server._guard is not None
            server._guard.kill()
            deadline = time.monotonic() + 60
            while not store.interruptions or near.read_progress(["topic"]) != {"topic": 4}:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert near.wait_any(["key"], timeout_s=30, what="it") == ("key", b"value")
