"""Looking at a store's server and stopping it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import PlanKeys, StoreAddress
from megatron_dynapipe.store.admin import JobReport, inspect_server, jobs_of, stop_server
from megatron_dynapipe.store.redis_store import open_store
from megatron_dynapipe.store.server import StoreServer
from tests.store.servers import free_port, serving

A = PlanKeys(job="a", settings_digest="s")
B = PlanKeys(job="b", settings_digest="s")


@pytest.mark.parametrize(
    ("keys", "jobs"),
    [
        ([], ()),
        (["dynapipe"], ()),
        (["dynapipe:", "dynapipe::", "dynapipe:a:b:c:not-a-number:0:0", "dynapipe:a:b:c:1:0:0:9"], ()),
        (["dynapipe:other program's", "dynapipe:{a}:b:c:1:0:0", "dynapipe:a:s:train:" + "9" * 5000 + ":0:0"], ()),
        (
            [
                A.plan(split="train", iteration=9, replica=0, stage=0),
                A.plan(split="train", iteration=10, replica=0, stage=1),
                A.plan(split="valid", iteration=2, replica=1, stage=0),
                A.progress("train"),
                B.error,
            ],
            (
                JobReport(job="a", plans=3, iterations={"train": (9, 10), "valid": (2, 2)}),
                JobReport(job="b"),
            ),
        ),
    ],
)
def test_keys_are_summed_up_by_job(keys: list[str], jobs: tuple[JobReport, ...]) -> None:
    assert jobs_of(keys) == jobs


@pytest.mark.parametrize(
    ("key", "database"),
    [("customer:7", 0), ("dynapipe-backup", 0), ("dynapipe:other program's", 0), ("customer:7", 3)],
)
def test_a_server_of_other_programs_is_stopped_by_force_alone(tmp_path: Path, key: str, database: int) -> None:
    """Attack: `store stop` shut a Redis down that held other people's keys."""
    port = free_port()
    address = StoreAddress(f"redis://127.0.0.1:{port}/0")
    with serving(tmp_path, f"port {port}", port=port) as process:
        with redis.Redis.from_url(f"redis://127.0.0.1:{port}/{database}") as client:
            client.set(key, "theirs")
            with pytest.raises(StoreError, match="it holds 1 keys of other programs"):
                stop_server(address)
            assert client.get(key) == b"theirs"
        stop_server(address, force=True)
        assert process.wait(20) == 0


def test_a_server_whose_user_may_not_stop_it_says_so() -> None:
    with StoreServer() as server:
        with pytest.raises(StoreError, match="failed while stopping it: "):
            stop_server(server.address)
        assert server.wait(0.01) is None


@pytest.mark.parametrize("act", [inspect_server, stop_server, open_store])
@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "unix://:secret@/no/such/socket"])
def test_server_that_is_gone_is_one_error_without_the_password(act: Callable[[StoreAddress], object], url: str) -> None:
    with pytest.raises(StoreError, match=r"plan store \S+\*\*\*@\S+ failed while greeting the server: ") as raised:
        act(StoreAddress(url))
    assert "secret" not in str(raised.value)
    assert "is the server running" in str(raised.value.hint)
