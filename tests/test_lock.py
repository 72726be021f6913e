"""The lock file: it holds what the project and its packages require."""

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.commands import ROOT, run, run_python

LOCK = ROOT / "requirements.lock"
OF_BRIDGE = ROOT / "requirements-bridge.lock"


def locked(heading: str = "", lock: Path = LOCK) -> dict[str, str]:
    """Versions by name: all, or those under one heading."""
    text = lock.read_text()
    if heading:
        text = text.partition(f"# --- {heading}: ")[2].partition("# ---")[0].partition("\n")[2]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9_-]+)(\[[a-z]+\])?==([0-9][\w.]*)", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if not pin]
    versions = {canonicalize_name(pin[1]): pin[3] for pin in pins if pin}
    assert len(versions) == len(lines)
    return versions


def test_lock_satisfies_every_direct_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    direct = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    direct += [requirement for extra in project["project"]["optional-dependencies"].values() for requirement in extra]
    versions = locked() | locked(lock=OF_BRIDGE)
    wrong = [
        text
        for text in direct
        if not (named := Requirement(text)).specifier.contains(versions.get(canonicalize_name(named.name), "0"))
    ]
    assert not wrong


def test_requirements_are_listed_without_what_a_container_brings() -> None:
    """As the quick start installs them."""
    (line,) = [line for line in (ROOT / "docs/quick-start.md").read_text().splitlines() if "list_requirements" in line]
    command = shlex.split(line.partition("<(python ")[2].removesuffix(")"))
    done = run_python(*command)
    names = [Requirement(line).name for line in done.stdout.splitlines()]
    assert {"msgspec", "megatron-core", "datasets", "plotly"} <= set(names)
    assert "torch" not in names and len(names) == len(set(names))


def test_lock_has_whatever_its_packages_require() -> None:
    run_python("-m", "pip", "check")


def test_what_the_demo_installs_has_whatever_it_requires() -> None:
    """The packages of tests, checkers and documents are not there."""
    names = locked("run").keys()
    required = {
        canonicalize_name(requirement.name)
        for name in names
        for text in importlib.metadata.requires(name) or ()
        if not (requirement := Requirement(text)).marker or requirement.marker.evaluate({"extra": ""})
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [
        *project["dependencies"],
        *(e for extra in ("train", "data", "plots") for e in project["optional-dependencies"][extra]),
    ]
    assert required | {canonicalize_name(Requirement(each).name) for each in direct} | {"nanobind", "pip"} <= names
    assert {"pytest", "ruff", "sphinx"} <= locked("check").keys()


def test_every_pin_has_the_digest_of_its_wheel_and_nothing_else_has_one() -> None:
    """pip refuses a list in which some packages have digests and others do not."""
    lines = (ROOT / "requirements.sha256").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+ sha256:[0-9a-f]{64}", line) for line in lines)
    digests = {line.partition(" ")[0] for line in lines}
    locks = (LOCK, OF_BRIDGE, ROOT / "requirements-oldest.lock")
    assert digests == {f"{name}=={version}" for lock in locks for name, version in locked(lock=lock).items()}


def test_set_up_gives_pip_the_digests(tmp_path: Path) -> None:
    (tmp_path / "pins").write_text("# a comment\nTypes_x.y[z]==1.0\nother==2\n")
    (tmp_path / "digests").write_text("# of\ntypes-x-y==1.0 sha256:ab\ntypes-x-y==1.0 sha256:cd\n")
    done = run("awk", "-f", str(ROOT / "scripts/hashed.awk"), str(tmp_path / "digests"), str(tmp_path / "pins"))
    assert done.stdout == "Types_x.y[z]==1.0 --hash=sha256:ab --hash=sha256:cd\nother==2\n"
