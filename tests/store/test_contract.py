"""What a plan store promises."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_dynapipe.core.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.store import Store, StoreServer, open_store
from tests.store.memory_store import MemoryStore

type Later = Callable[..., None]


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer() as running:
        yield running


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    server: StoreServer = request.getfixturevalue("server")
    with open_store(server.address) as connected:
        yield connected


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this test's own: the server is shared."""
    return f"dynapipe:test:{request.node.name}"


@pytest.fixture
def later(store: Store) -> Iterator[Later]:
    """Runs an action on the store after a while; the test ends when all have run."""
    timers: list[threading.Timer] = []

    def start(action: Callable[[], object], delay_s: float = 0.15) -> None:
        timers.append(threading.Timer(delay_s, action))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join(10)


def test_a_value_is_read_as_it_was_published(store: Store, key: str) -> None:
    """The largest has 16 MB, a hundred times a large plan."""
    every_byte = bytes(range(256))
    for at, value in enumerate((b"", bytes(100), every_byte, every_byte * 64_000)):
        store.put_all([(f"{key}:{at}", value)])
        assert store.wait_any([f"{key}:{at}"], timeout_s=10, what="it") == (f"{key}:{at}", value)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_a_value_above_the_limit_is_refused(store: Store, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dynapipe.store.redis_store.MAX_VALUE_BYTES", 10)
    with pytest.raises(StoreError, match="is 11 B, above the limit of 10 B"):
        store.put_all([(key, bytes(11))])


def test_several_keys_are_published_in_order(store: Store, key: str) -> None:
    items = [(f"{key}:{index}", b"%d" % index) for index in range(600)]
    store.put_all([items[3]])
    store.put_all(items)
    store.put_all([])
    for name, value in items:
        assert store.wait_any([name], timeout_s=5, what="it")[1] == value
    store.put_all([items[0], (items[1][0], b"other"), (f"{key}:new", b"new")])  # the first writer wins
    assert store.wait_any([items[1][0]], timeout_s=5, what="it")[1] == b"1"
    assert store.wait_any([f"{key}:new"], timeout_s=5, what="it")[1] == b"new"


def test_every_waiting_reader_gets_the_value(store: Store, key: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        waits = [pool.submit(store.wait_any, [key], timeout_s=10, what="it") for _ in range(6)]
        time.sleep(0.2)
        assert not any(wait.done() for wait in waits)
        store.put_all([(key, b"plan")])
        assert [wait.result() for wait in waits] == [(key, b"plan")] * 6


def test_of_several_keys_the_first_that_comes_or_is_asked_for_is_returned(store, key, later):
    later(lambda: store.put_all([(f"{key}:b", b"2")]))
    assert store.wait_any([f"{key}:a", f"{key}:b"], timeout_s=10, what="either") == (f"{key}:b", b"2")
    store.put_all([(f"{key}:a", b"1")])
    for order in ("ab", "ba"):
        keys = [f"{key}:{name}" for name in order]
        assert store.wait_any(keys, timeout_s=5, what="both")[0] == keys[0]


def test_a_wait_that_ends_in_vain_says_for_what_and_how_long(store: Store, key: str) -> None:
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError) as caught:
        store.wait_any([f"{key}:a", f"{key}:b"], timeout_s=0.3, what="the plan of iteration 7")
    assert 0.25 < time.monotonic() - started < 2
    assert str(caught.value).startswith(
        f"waited 0.3 s for the plan of iteration 7, and none of these came: {key}:a, {key}:b"
    )


def test_a_deleted_key_is_gone_and_may_be_published_anew(store: Store, key: str) -> None:
    store.put_all([(key, b"plan")])
    store.delete([key, f"{key}:never"])
    store.delete([])
    with pytest.raises(StoreTimeoutError):
        store.wait_any([key], timeout_s=0.05, what="it")
    store.put_all([(key, b"again")])
    assert store.wait_any([key], timeout_s=5, what="it")[1] == b"again"


@pytest.mark.parametrize(
    ("announced", "goal", "reached"),
    [
        *(([0], 0, 0), ([3], 3, 3), ([3], 0, 3), ([1, 2, 5], 4, 5), ([5, 2], 4, 5), ([5, 5], 5, 5)),
        *(([2, 3], 4, None), ([], 0, None)),
    ],
)
def test_progress_is_the_largest_value_announced(store, key, announced, goal, reached):
    for value in announced:
        store.announce(key, value)
    assert store.read_progress([key, f"{key}:none"]) == ({key: max(announced)} if announced else {})
    if reached is None:
        with pytest.raises(StoreTimeoutError, match=r"waited 0\.05 s for training, and none of these came"):
            store.wait_progress({key: goal}, timeout_s=0.05, what="training")
    else:
        assert store.wait_progress({key: goal}, timeout_s=5, what="training") == {key: reached}


def test_progress_wakes_a_waiter_only_when_its_goal_is_reached(store: Store, key: str, later: Later) -> None:
    later(lambda: store.announce(key, 4), 0.1)
    later(lambda: store.announce(key, 5), 0.3)
    started = time.monotonic()
    assert store.wait_progress({key: 5}, timeout_s=10, what="training") == {key: 5}
    assert time.monotonic() - started > 0.25


def test_progress_of_any_of_several_topics_ends_the_wait(store: Store, key: str, later: Later) -> None:
    store.announce(f"{key}:train", 3)
    later(lambda: store.announce(f"{key}:valid", 1))
    goals = {f"{key}:train": 9, f"{key}:valid": 1}
    assert store.wait_progress(goals, timeout_s=10, what="training") == {f"{key}:valid": 1}
    store.announce(f"{key}:train", 10)
    assert store.wait_progress(goals, timeout_s=5, what="training") == {f"{key}:train": 10, f"{key}:valid": 1}


def test_negative_progress_and_a_wait_without_key_or_deadline_are_bugs_of_ours(store: Store, key: str) -> None:
    with pytest.raises(AssertionError, match="progress is never negative, got -1"):
        store.announce(key, -1)
    for keys, timeout_s in (([], 1.0), ([key], 0.0), ([key], float("inf"))):
        with pytest.raises(AssertionError, match="a wait needs"):
            store.wait_any(keys, timeout_s=timeout_s, what="nothing")
