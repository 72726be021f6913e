"""Servers of other makers and versions than a run's own.

Those on the PATH, and those whose programs DYNAPIPE_TEST_SERVERS lists, separated by colons.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_dynapipe.errors import StoreError, StoreFullError
from megatron_dynapipe.store import StoreAddress, open_store
from megatron_dynapipe.store.connection import OLDEST_REDIS
from megatron_dynapipe.store.redis_store import COMMANDS
from tests.store.servers import free_port, serving
from tests.store.test_server_kinds import use

_NAMED = os.environ.get("DYNAPIPE_TEST_SERVERS", "").split(":")
_ON_PATH = (shutil.which(name) for name in ("redis-server", "valkey-server"))
PROGRAMS = [Path(program) for program in (*_NAMED, *_ON_PATH) if program]


def version_of(program: Path) -> str:
    """As in "Redis server v=7.0.15 sha=…"."""
    text = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=([0-9.]+)", text)
    assert found is not None, text
    return found[1]


@pytest.mark.skipif(not PROGRAMS, reason="needs a server on the PATH or in DYNAPIPE_TEST_SERVERS")
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_serves_plans_or_is_refused_by_its_version(tmp_path: Path, program: Path) -> None:
    port, version = free_port(), version_of(program)
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
