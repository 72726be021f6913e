"""Training on a store under TLS, a full, a slow and a stopped one: the losses of an undisturbed run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dynapipe.store import open_store
from tests.helpers.entry_scripts import run_entry, script_of, words
from tests.helpers.processes import run_ranks
from tests.store.servers import Relay, certificate, free_port, serving

ITERATIONS = 8
FLAGS = f"--pipeline-model-parallel-size 2 --train-iters {ITERATIONS} --dynapipe-lookahead 2"
NODE_PLANS = "rank 0 makes"


def losses(data: Path, folder: Path, flags: str, *, kill: str | None = None, **environment: str) -> tuple[dict, str]:
    """The losses of a run on two stages, and what its first rank says on stderr."""
    argv = words("gpt", data, f"{FLAGS} {flags}", report=folder / "report")
    given = {"script": script_of("gpt"), "argv": argv, "kill": kill, "pictures": False}
    first, last = run_ranks(run_entry, 2, given, deadline_s=280, environment=environment)
    assert (first["status"], last["status"]) == (0, 0), first["stderr"] + last["stderr"]
    assert len(last["losses"]) == ITERATIONS
    return last["losses"], first["stderr"]


@contextmanager
def store(folder: Path, settings: str = "", *, tls: bool = False, delay_s: float = 0.0) -> Iterator[str]:
    """A server behind a relay; the flag that names its URL. Planners have to publish there, unless it is full."""
    port = free_port()
    with serving(folder, f"port {port}\n{settings}", port=port):
        relay = Relay(port, certificate(folder) if tls else None, delay_s=delay_s)
        (folder / "url").write_text(f"redis{'s' if tls else ''}://localhost:{relay.port}/0")
        yield f"--dynapipe-store-url-file {folder / 'url'}"
        relay.close()
        with open_store(f"redis://localhost:{port}/0") as near:
            assert "maxmemory" in settings or "cmdstat_xadd" in near.info("commandstats")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return losses(data, tmp_path_factory.mktemp("undisturbed"), "")[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes the certificate")
def test_a_store_under_tls(data: Path, tmp_path: Path, undisturbed: dict) -> None:
    with store(tmp_path, tls=True) as flag:
        found, _ = losses(data, tmp_path, flag, SSL_CERT_FILE=str(tmp_path / "cert.pem"))
    assert found == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_store(data: Path, tmp_path: Path, undisturbed: dict) -> None:
    """Its planners can publish nothing: the node makes every plan."""
    with store(tmp_path, "maxmemory 1mb\nmaxmemory-policy noeviction") as flag:
        found, said = losses(data, tmp_path, flag)
    assert found == pytest.approx(undisturbed, rel=1e-6) and NODE_PLANS in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_store(data: Path, tmp_path: Path, undisturbed: dict) -> None:
    """Every message takes 0.2 s longer."""
    with store(tmp_path, delay_s=0.2) as flag:
        found, _ = losses(data, tmp_path, flag)
    assert found == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_store(data: Path, tmp_path: Path, undisturbed: dict) -> None:
    """From the third iteration on the server takes connections, and answers nothing."""
    found, said = losses(data, tmp_path, "", kill="stop valkey-server")
    assert found == pytest.approx(undisturbed, rel=1e-6) and NODE_PLANS in said
