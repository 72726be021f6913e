"""What a rank has published, published again to a store that has come back empty."""

from megatron_dynapipe.service.client import Republisher
from megatron_dynapipe.store import StoreServer, open_store
from tests.helpers.memory_store import MemoryStore
from tests.helpers.waiting import until


def test_nothing_is_published_again_while_the_store_is_there() -> None:
    store = MemoryStore()
    own = Republisher(store, "dynapipe:topic")
    store.put("dynapipe:key", b"value")
    own.keep("dynapipe:key", b"value")
    assert own.restore() == 0


def test_a_store_that_came_back_empty_or_whose_keys_have_expired_gets_everything_once() -> None:
    """By hand: the clock of a shared server jumped ahead; planners waited for measured passes that nobody sent."""
    store = MemoryStore()
    own = Republisher(store, "dynapipe:topic")
    own.keep("dynapipe:old", b"forgotten")
    own.forget("dynapipe:old")
    own.keep("dynapipe:key", b"value")
    own.keep_progress("dynapipe:topic", 3)
    own.keep_progress("dynapipe:topic", 4)
    assert own.restore() == 2
    assert own.restore() == 0
    assert store.read_progress(["dynapipe:topic"]) == {"dynapipe:topic": 4}
    assert store.wait_any(["dynapipe:key"], timeout_s=30, what="it") == ("dynapipe:key", b"value")


def test_what_was_published_before_a_loss_comes_back_though_newer_keys_are_there() -> None:
    """Found by a campaign: a planner that started again waited in vain for the passes of an earlier version."""
    store = MemoryStore()
    own = Republisher(store, "dynapipe:topic")
    own.keep("dynapipe:old", b"lost")
    for key in ("dynapipe:new", "dynapipe:newer"):
        store.put(key, b"value")
        own.keep(key, b"value")
    assert own.restore() == 3
    assert store.wait_any(["dynapipe:old"], timeout_s=30, what="it") == ("dynapipe:old", b"lost")


def test_a_rank_that_asks_for_nothing_learns_that_its_server_has_started_again() -> None:
    with StoreServer(restarts=1) as server, open_store(server.address, patience_s=30) as store:
        store.put("dynapipe:key", b"value")
        store.announce("dynapipe:topic", 4)
        with (
            Republisher(store, "dynapipe:topic", interval_s=0.1) as own,
            open_store(server.address, patience_s=30) as near,
        ):
            own.keep("dynapipe:key", b"value")
            own.keep_progress("dynapipe:topic", 4)
            assert server._guard is not None
            server._guard.kill()
            until(lambda: store.interruptions and near.read_progress(["dynapipe:topic"]) == {"dynapipe:topic": 4})
            assert near.wait_any(["dynapipe:key"], timeout_s=30, what="it") == ("dynapipe:key", b"value")
