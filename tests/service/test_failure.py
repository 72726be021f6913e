"""What planners say of their errors, and what ranks make of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.service.failure import decode_failure, describe_failure, publish_failure
from megatron_dynapipe.store import StoreServer, open_store


def test_the_first_failure_is_the_one_kept(settings, store) -> None:
    job = settings()
    for text in ("first", "second"):
        publish_failure(store, job.keys, describe_failure(ValueError(text), who="planner 0", doing="testing"))
    _, data = store.wait_any([job.keys.error], timeout_s=5, what="it")
    assert "failed while testing: ValueError: first\n" in decode_failure(data).message


def test_a_failure_that_cannot_be_published_is_logged(settings, caplog) -> None:
    with StoreServer() as server:
        store = open_store(server.address)
    publish_failure(store, settings().keys, describe_failure(ValueError("x"), who="planner 0", doing="testing"))
    assert "cannot publish what went wrong: plan store redis://***@127.0.0.1" in caplog.text


@pytest.mark.parametrize("data", [b"\xffgibberish", b'{"who": "0", "doing": "\xff\xfe"}', b"[" * 100_000, b"", b"null"])
def test_what_is_no_failure_is_shown_as_it_is(data: bytes) -> None:
    error = decode_failure(data)
    assert "reports failures in another form" in error.message and data.decode(errors="replace") in error.message
    assert error.hint == "install the same version on every node"


@given(st.binary(max_size=200))
def test_any_bytes_are_shown(data: bytes) -> None:
    assert decode_failure(data).message
