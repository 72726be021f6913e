"""Servers of other kinds: those that serve plans, and those that are refused by name.

Of other makers and versions: those on the PATH, and those whose programs DYNAPIPE_TEST_SERVERS lists, with colons.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.store import PlanKeys, StoreAddress, new_job_name, open_store
from megatron_dynapipe.store.connection import OLDEST_REDIS, check_kind, fields_of
from megatron_dynapipe.store.redis_store import COMMANDS
from tests.helpers.commands import run
from tests.store.servers import Relay, certificate, free_port, serving

ADDRESS = StoreAddress("redis://:secret@plans:6379/0")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("redis_version:6.2.0\r\nredis_mode:standalone\r\n", None),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\nserver_mode:standalone\r\n", None),
        ("redis_version:dev\r\n", None),
        ("", None),
        ("# a line that is none", None),
        ("redis_version:7.2.4\r\nredis_mode:cluster\r\n", "got a Redis Cluster"),
        ("redis_version:7.2.4\r\nserver_mode:cluster\r\n", "got a Redis Cluster"),
        ("redis_version:7.0.0\r\nredis_mode:sentinel\r\n", "got a Redis Sentinel"),
        ("redis_version:6.0.16\r\nredis_mode:standalone\r\n", "got Redis 6.0.16"),
        ("redis_version:5.0.7\r\n", "expected Redis 6.2 or newer"),
    ],
)
def test_servers_that_cannot_serve_plans_are_named(info: str, message: str | None) -> None:
    if message is None:
        check_kind(ADDRESS, fields_of(info))
        return
    with pytest.raises(StoreError, match=message) as caught:
        check_kind(ADDRESS, fields_of(info))
    assert caught.value.hint is not None and "secret" not in str(caught.value)


CLUSTER = "cluster-enabled yes\ncluster-port {other}\ncluster-config-file nodes-{port}.conf"


@pytest.mark.parametrize(
    ("settings", "words", "kind"),
    [(CLUSTER, (), "Cluster"), ("sentinel monitor mine 127.0.0.1 {other} 1", ("--sentinel",), "Sentinel")],
)
def test_a_node_of_a_cluster_and_a_sentinel_are_refused(tmp_path, settings, words, kind):
    port = free_port()
    lines = f"port {port}\n{settings.format(port=port, other=free_port())}"
    with serving(tmp_path, lines, port=port, words=words), pytest.raises(StoreError, match=f"got a Redis {kind}"):
        open_store(f"redis://127.0.0.1:{port}")


def use(url: str) -> None:
    """Everything that a run asks of its store."""
    keys = PlanKeys(job=new_job_name(), settings_digest="s")
    plan = keys.plan(split="train", iteration=0, replica=0, stage=0)
    with open_store(url, retention_s=60) as store:
        store.put_all([(plan, b"plan")])
        store.announce(keys.progress("train"), 1)
        assert store.read_progress([keys.progress("train")]) == {keys.progress("train"): 1}
        assert store.wait_any([plan], timeout_s=5, what="it") == (plan, b"plan")
        with pytest.raises(StoreTimeoutError):
            store.wait_any([keys.error], timeout_s=0.1, what="it")
        store.delete([plan])


def test_a_user_needs_no_more_than_is_documented(tmp_path: Path) -> None:
    port = free_port()
    user = f"user plans on >it%is~me ~dynapipe:* {COMMANDS}"
    with serving(tmp_path, f"port {port}\nuser default off\n{user}", port=port):
        use(f"redis://plans:it%25is~me@127.0.0.1:{port}/0")
        with pytest.raises(StoreError, match="permissions") as caught:
            with open_store(f"redis://plans:it%25is~me@127.0.0.1:{port}/0") as store:
                store.put_all([("another:program", b"")])
        assert caught.value.hint == "check user and password in the store's URL"
    for text in ("it%is~me", "it%25is~me"):
        assert text not in str(caught.value)
    assert COMMANDS in (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")
def test_a_server_under_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminator of TLS stands before the server, since the embedded one is built without."""
    cert, key = certificate(tmp_path)
    port = free_port()
    with serving(tmp_path, f"port {port}\nuser default off\nuser u on >p ~* +@all", port=port):
        relay = Relay(port, (cert, key))
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        use(f"rediss://u:p@localhost:{relay.port}/0")
        with pytest.raises(StoreError, match=r"rediss://\*\*\*@localhost"):
            open_store(f"rediss://u:wrong@localhost:{relay.port}/0")
        with pytest.raises(StoreError):  # not under TLS
            open_store(f"redis://u:p@localhost:{relay.port}/0", reply_timeout_s=5)
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(StoreError, match="certificate verify failed") as caught:
            open_store(f"rediss://u:p@localhost:{relay.port}/0")
        assert "SSL_CERT_FILE" in str(caught.value.hint)
        relay.close()


_NAMED = os.environ.get("DYNAPIPE_TEST_SERVERS", "").split(":")
_ON_PATH = (shutil.which(name) for name in ("redis-server", "valkey-server"))
PROGRAMS = [Path(program) for program in (*_NAMED, *_ON_PATH) if program]


@pytest.mark.skipif(not PROGRAMS, reason="needs a server on the PATH or in DYNAPIPE_TEST_SERVERS")
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_serves_plans_or_is_refused_by_its_version(tmp_path: Path, program: Path) -> None:
    (version,) = re.findall(r"v=([0-9.]+)", run(program, "--version").stdout)  # Redis server v=7.0.15 sha=…
    port = free_port()
    url, admin = f"redis://plans:p@127.0.0.1:{port}/0", StoreAddress(f"redis://127.0.0.1:{port}/0")
    user = f"user plans on >p ~dynapipe:* {COMMANDS}\nmaxmemory 4mb\nmaxmemory-policy noeviction"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_REDIS:
        with serving(tmp_path, f"port {port}", port=port, program=program):
            with pytest.raises(StoreError, match=re.escape(f"got Redis {version}")) as caught:
                open_store(admin)
            assert caught.value.hint == "a run without a store's URL starts a server of its own"
        return
    with serving(tmp_path, f"port {port}\n{user}", port=port, program=program):
        use(url)
        with open_store(url) as store, pytest.raises(StoreFullError):
            store.put_all([(f"dynapipe:{number}", bytes(100_000)) for number in range(100)])
