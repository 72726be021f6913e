"""The checks of `doctor` that look at the machine."""

import importlib.metadata
import socket
from types import SimpleNamespace

import pytest

from megatron_dynapipe import megatron_version
from megatron_dynapipe.cli import checks, machine_checks


@pytest.mark.parametrize(
    ("required", "status", "found"),
    [
        ("pytest>=1", "ok", "required packages are of versions that were tried"),
        ("pytest>=1000", "fail", "expected pytest>=1000, found "),
        ("no-such-package-here>=1", "fail", "expected no-such-package-here>=1, found none"),
        ('no-such-package-here; extra == "dev"', "ok", "required packages"),
        ('no-such-package-here; extra == "train"', "fail", "expected no-such-package-here, found none"),
        ('no-such-package-here; extra == "data"', "note", "expected no-such-package-here, found none"),
        ('no-such-package-here; python_version < "3"', "ok", "required packages"),
        ('pytest>=1; extra == "train"', "ok", "required packages"),
    ],
)
def test_required_versions(monkeypatch, required, status, found):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [required])
    told = machine_checks.check_requirements("versions")
    assert told.status == status and told.found.startswith(found)
    assert (told.hint is None) == (status == "ok")
    if 'extra == "data"' in required:
        assert str(told.hint).startswith("pip install --upgrade 'megatron-dynapipe[data]'")


def test_a_package_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(machine_checks, "DISTRIBUTION", "no-such-package-here")
    assert machine_checks.check_requirements("versions").hint == "pip install ."


@pytest.mark.parametrize(("available_kb", "status"), [(10_000_000, "ok"), (2_000_000, "note")])
def test_memory(monkeypatch, available_kb, status):
    monkeypatch.setattr(machine_checks, "_lines", lambda _: ["MemTotal: 9 kB", f"MemAvailable:  {available_kb} kB"])
    told = machine_checks.check_memory("memory")
    assert told.status == status and f"{available_kb * 1024 // 1_000_000:,} MB" in told.found


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "note"), (2**33, "ok")])
def test_shared_memory_of_a_container(monkeypatch, free, status):
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    told = machine_checks.check_shared_memory("shared memory")
    assert told.status == status
    assert status == "ok" or "--shm-size=8g" in str(told.hint)


def test_a_port_that_is_taken_is_said(monkeypatch):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        monkeypatch.setattr(machine_checks, "LAUNCH_PORT", taken.getsockname()[1])
        told = machine_checks.check_network("network")
    assert told.status == "note" and "--standalone" in str(told.hint)


def test_a_blocked_loopback_fails(monkeypatch):
    def refuse(*_, **__):
        raise OSError("refused")

    monkeypatch.setattr(machine_checks.socket, "create_connection", refuse)
    told = machine_checks.check_network("network")
    assert told.status == "fail" and told.found == "no connection to 127.0.0.1: refused"


def test_a_second_megatron_on_the_path_is_said(monkeypatch, tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "megatron" / "core").mkdir(parents=True)
        (folder / "megatron" / "core" / "package_info.py").touch()
    monkeypatch.setattr(megatron_version.sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    monkeypatch.setattr(megatron_version, "find_version", lambda: "0.19.2")
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: object())
    told = checks.check_megatron("megatron-core")
    assert told.status == "note"
    assert told.found.endswith(
        f"at {tmp_path / 'a' / 'megatron'}; another at {tmp_path / 'b' / 'megatron'} is hidden by it"
    )
