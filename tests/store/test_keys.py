"""Names in the store, and addresses whose password stays hidden."""

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.store import PlanKeys, StoreAddress, new_job_name

KEYS = PlanKeys(job="run-7", settings_digest="ab12")


def test_the_layout_of_keys() -> None:
    assert KEYS.plan(split="train", iteration=41, replica=1, stage=3) == "dynapipe:run-7:ab12:train:41:1:3"
    assert KEYS.progress("valid") == "dynapipe:run-7:ab12:valid:progress"
    assert KEYS.error == "dynapipe:run-7:error"


@pytest.mark.parametrize("bad", ["", "a:b", "a b", "x" * 129, "a\n"])
@pytest.mark.parametrize("field", ["job", "settings_digest"])
def test_names_that_would_break_keys_are_refused(field: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be 1 to 128 letters, digits, dots, dashes"):
        PlanKeys(**({"job": "a", "settings_digest": "b"} | {field: bad}))


def test_every_launch_has_a_name_of_its_own() -> None:
    names = {new_job_name() for _ in range(100)}
    assert len(names) == 100
    assert all(PlanKeys(job=name, settings_digest="b") for name in names)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@node1:6379/0", "redis://***@node1:6379/0"),
        ("redis://planner:hunter2@node1:6379/0", "redis://***@node1:6379/0"),
        ("rediss://:hunter2@[fe80::1]:6379", "rediss://***@[fe80::1]:6379"),
        ("redis://:hunter2@node1", "redis://***@node1"),
        ("redis://:hun@ter2@node1", "redis://***@node1"),
        ("redis://node1:6379/15", "redis://node1:6379/15"),
        ("redis://node1:6379/", "redis://node1:6379/"),
        ("unix://:hunter2@/run/valkey.sock", "unix://***@/run/valkey.sock"),
    ],
)
def test_an_address_shows_no_password(url: str, shown: str) -> None:
    address = StoreAddress(url)
    assert address.url == url
    assert str(address) == shown
    assert repr(address) == f"StoreAddress({shown!r})"
    assert "hunter2" not in f"{[address]} {address}"


MALFORMED = [
    *("", "node1:6379", "http://:hunter2@node1", "redis://", "redis://:hunter2@", "redis://:hunter2@node1:port"),
    *("redis://:hunter2@node1:99999", "redis://node1?password=hunter2", "unix://", "redis://:hunter2@[node1"),
    # what a client would read otherwise
    *("redis://node 1:6379/0", "redis://node1:6379/0\n", " redis://node1:6379/0", "redis://node1:6379/plans"),
    *("redis://node1:6379/1x", "redis://node1:6379/-1", "redis://node1:6379/0/1", "redis://node1:6379/" + "9" * 5000),
    *("redis://node1:0/0", "redis://" + "x" * 300 + ":6379/0", "redis://a..b:6379/0", "unix:///run/valkey socket"),
    "redis://:hunter2\x00@node1",
]


@pytest.mark.parametrize("url", MALFORMED)
def test_a_malformed_address_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"the plan store's URL must be redis://\[user:password@\]host") as caught:
        StoreAddress(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_tcp_address_escapes_its_password() -> None:
    assert StoreAddress.tcp("node1", 7, "a/b@c").url == "redis://:a%2Fb%40c@node1:7/0"
    assert StoreAddress.tcp("::1", 7, "x").url == "redis://:x@[::1]:7/0"
