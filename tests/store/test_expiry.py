"""How long keys live: as long as the server where it is the job's own, as long as the job on any other."""

import time
from collections.abc import Iterator

import pytest
import redis

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.store import PlanKeys, StoreAddress, StoreServer, new_job_name, open_store, renewed_keys
from tests.store.servers import free_port, serving


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    """A server that others share, whose administrator this test is."""
    port = free_port()
    with serving(tmp_path_factory.mktemp("server"), f"port {port}", port=port):
        yield StoreAddress(f"redis://127.0.0.1:{port}/0")


@pytest.fixture
def raw(address: StoreAddress) -> Iterator[redis.Redis]:
    """The server as any other program sees it."""
    with redis.Redis.from_url(address.url) as client:
        yield client


@pytest.fixture
def keys() -> PlanKeys:
    return PlanKeys(job=new_job_name(), settings_digest="s")


def a_plan(keys: PlanKeys) -> str:
    return keys.plan(split="test", iteration=0, replica=0, stage=0)


@pytest.mark.parametrize(("retention_s", "least", "most"), [(None, -1, -1), (100, 90, 100)])
def test_keys_expire_only_where_they_are_to(address, raw, keys, retention_s, least, most) -> None:
    with open_store(address, retention_s=retention_s) as store:
        store.put(a_plan(keys), b"plan")
        store.announce(keys.progress("train"), 3)
    for key in (a_plan(keys), keys.progress("train")):
        assert least <= raw.ttl(key) <= most


def test_renewal_keeps_a_job_s_keys_beyond_their_expiry_and_deletes_them_at_its_end(address, raw, keys) -> None:
    other = PlanKeys(job=f"{keys.job}2", settings_digest="s")
    with open_store(address, retention_s=1) as store, open_store(address, retention_s=60) as long:
        long.put(a_plan(other), b"another job's")
        with renewed_keys(store, keys.job, interval_s=0.2):
            store.put(a_plan(keys), b"plan")
            store.announce(keys.progress("train"), 3)
            time.sleep(1.7)
            assert store.wait_any([a_plan(keys)], timeout_s=1, what="it")[1] == b"plan"
            assert raw.exists(keys.progress("train"))
        assert not raw.keys(f"dynapipe:{keys.job}:*")
        assert raw.exists(a_plan(other))
        store.put(a_plan(keys), b"plan")
        time.sleep(1.2)
        assert not raw.exists(a_plan(keys))


def test_renewal_leaves_what_other_ranks_must_still_read_where_its_block_failed(address, raw, keys) -> None:
    with open_store(address) as store:
        store.put(a_plan(keys), b"plan")

        def fail() -> None:
            with renewed_keys(store, keys.job):
                store.put(keys.error, b"what went wrong")
                raise KeyError

        with pytest.raises(KeyError):
            fail()
    assert raw.exists(keys.error)
    assert raw.ttl(keys.error) > 0


def test_renewal_renews_more_keys_than_one_scan_returns(address, raw, keys) -> None:
    with open_store(address, retention_s=50) as store:
        for iteration in range(2500):
            store.put(keys.plan(split="train", iteration=iteration, replica=0, stage=0), b"")
    with open_store(address, retention_s=1000) as store:
        assert store.renew(keys.job) == 2500
        assert min(raw.ttl(key) for key in raw.scan_iter(f"dynapipe:{keys.job}:*")) > 900
        assert store.delete_job(keys.job) == 2500
    assert not raw.keys(f"dynapipe:{keys.job}:*")


def test_renewal_outlives_a_server_that_is_gone(keys, caplog) -> None:
    with StoreServer() as own, open_store(own.address) as store, renewed_keys(store, keys.job, interval_s=0.05):
        own._stop()
        time.sleep(0.3)
    assert "cannot renew" in caplog.text


def test_a_wait_in_vain_names_expiry_and_eviction(address) -> None:
    with open_store(address) as store, pytest.raises(StoreTimeoutError) as caught:
        store.wait_any(["dynapipe:nothing"], timeout_s=0.05, what="a plan")
    assert "expired" in str(caught.value.hint) and "evict" in str(caught.value.hint)


@pytest.mark.parametrize(("policy", "warns"), [("noeviction", False), ("allkeys-lru", True), ("volatile-ttl", True)])
def test_a_server_that_may_evict_plans_is_warned_of(address, raw, policy, warns) -> None:
    raw.config_set("maxmemory-policy", policy)
    try:
        with open_store(address) as store:
            said = store.eviction_warning()
    finally:
        raw.config_set("maxmemory-policy", "noeviction")
    assert (said is not None) == warns
    assert said is None or (policy in said and "noeviction" in said)


def test_a_slow_reply_is_waited_for_as_long_as_the_caller_says(address, raw, keys) -> None:
    with (
        open_store(address, reply_timeout_s=10.0) as patient,
        open_store(address, reply_timeout_s=0.2) as hasty,
    ):
        raw.execute_command("CLIENT", "PAUSE", "1200", "ALL")
        with pytest.raises(StoreError, match="failed while publishing"):
            hasty.put(f"{a_plan(keys)}", b"plan")
        patient.put(a_plan(keys), b"plan")


def test_a_key_that_another_program_wrote_is_reported(address, raw) -> None:
    raw.set("dynapipe:spoiled", "text")
    with (
        open_store(address) as store,
        pytest.raises(StoreError, match="publishing dynapipe:spoiled: WRONGTYPE") as caught,
    ):
        store.put("dynapipe:spoiled", b"plan")
    assert caught.value.hint is not None and caught.value.hint.startswith("the server must be Redis or Valkey, 6.2")
