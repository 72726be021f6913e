"""How long keys live: as long as the server where it is the job's own, for so many seconds on any other."""

from collections.abc import Iterator

import pytest
import redis

from megatron_dynapipe.core.errors import StoreError
from megatron_dynapipe.store import PlanKeys, StoreAddress, new_job_name, open_store
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
        store.put_all([(a_plan(keys), b"plan")])
        store.announce(keys.progress("train"), 3)
    for key in (a_plan(keys), keys.progress("train")):
        assert least <= raw.ttl(key) <= most


def test_a_slow_reply_is_waited_for_as_long_as_the_caller_says(address, raw, keys) -> None:
    with open_store(address, reply_timeout_s=10.0) as patient, open_store(address, reply_timeout_s=0.2) as hasty:
        raw.execute_command("CLIENT", "PAUSE", "1200", "ALL")
        with pytest.raises(StoreError, match="failed while"):
            hasty.put_all([(f"{a_plan(keys)}", b"plan")])
        patient.put_all([(a_plan(keys), b"plan")])


def test_a_key_that_another_program_wrote_is_reported(address, raw) -> None:
    raw.set("dynapipe:spoiled", "text")
    message = r"publishing dynapipe:spoiled and 0 more: .*WRONGTYPE"
    with open_store(address) as store, pytest.raises(StoreError, match=message) as caught:
        store.put_all([("dynapipe:spoiled", b"plan")])
    assert caught.value.hint is not None and caught.value.hint.startswith("the server must be Redis or Valkey, 6.2")
