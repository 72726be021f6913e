"""Looking at a store's server and stopping it."""

import pytest

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.admin import JobReport, inspect_server, jobs_of, stop_server
from megatron_dynapipe.store.keys import PlanKeys
from megatron_dynapipe.store.redis_store import open_store
from megatron_dynapipe.store.server import StoreServer

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
                JobReport(job="a", plans=3, iterations={"train": (9, 10), "valid": (2, 2)}, failed=False),
                JobReport(job="b", plans=0, iterations={}, failed=True),
            ),
        ),
    ],
)
def test_keys_are_summed_up_by_job(keys: list[str], jobs: tuple[JobReport, ...]) -> None:
    assert jobs_of(keys) == jobs


def test_running_server_is_inspected_and_stopped() -> None:
    with StoreServer(memory_limit_mb=50) as server:
        with open_store(server.address) as store:
            store.put(A.plan(split="train", iteration=1, replica=0, stage=0), b"plan")
            report = inspect_server(server.address)
        assert report.server.split()[0] in ("Valkey", "Redis")
        assert report.memory_limit_bytes == 50_000_000
        assert report.clients == 1
        assert report.jobs == (JobReport(job="a", plans=1, iterations={"train": (1, 1)}, failed=False),)
        assert server.wait(0.01) is None
        stop_server(server.address)
        assert server.wait(10.0) == 0


@pytest.mark.parametrize("act", [inspect_server, stop_server])
def test_server_that_is_gone_is_one_error_without_the_password(act: object) -> None:
    assert callable(act)
    with pytest.raises(StoreError, match=r"plan store redis://\*\*\*@127.0.0.1:1/0 failed while") as raised:
        act(StoreAddress.tcp("127.0.0.1", 1, "secret"))
    assert "secret" not in str(raised.value)
    assert "store start" in str(raised.value.hint)


def test_wrong_password_is_refused() -> None:
    with StoreServer() as server:
        wrong = StoreAddress(server.address.url.replace("://:", "://:x"))
        with pytest.raises(StoreError, match="failed while stopping it"):
            stop_server(wrong)
        assert server.wait(0.01) is None
