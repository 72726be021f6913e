"""Extras: the table in the code is that of pyproject.toml."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_dynapipe.extras import EXTRA_OF, missing

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT_BY = {"megatron": "megatron-core", "sympy": "torch"}
"""The requirement that brings a package of another name."""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(requirement).name.lower() for requirement in requirements}


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_an_extra_brings_what_it_is_named_for(package: str, extra: str) -> None:
    assert BROUGHT_BY.get(package, package) in names(PROJECT["optional-dependencies"][extra])
    assert BROUGHT_BY.get(package, package) not in names(PROJECT["dependencies"])


def test_every_package_of_an_extra_is_in_the_table() -> None:
    extras = PROJECT["optional-dependencies"]
    brought = {name for extra in ("train", "data", "plots") for name in names(extras[extra])}
    assert brought == {BROUGHT_BY.get(package, package) for package in EXTRA_OF}


@pytest.mark.parametrize("name", ["megatron_dynapipe.nothing", "json.nothing", None])
def test_a_module_that_no_extra_brings_is_no_matter_of_extras(name: str | None) -> None:
    assert missing(ModuleNotFoundError("no module", name=name)) is None


@pytest.mark.parametrize("script", ["pretrain_gpt_multitask.py", "pretrain_t5_multitask.py"])
@pytest.mark.parametrize(
    ("python", "module", "code", "said"),
    [
        (
            *(sys.executable, "torch", "raise ModuleNotFoundError(name='torch')"),
            "error: expected the package torch, which the extra [train] brings, found none",
        ),
        ("python3.11", "nothing", "", "error: expected Python 3.12 or later, got 3.11."),
        (
            *(sys.executable, "sitecustomize", "import sys; sys.modules['megatron_dynapipe.core._native'] = None"),
            "error: expected the planner's native core",
        ),
    ],
)
def test_an_entry_script_says_what_it_lacks(
    python: str, module: str, code: str, said: str, script: str, tmp_path: Path
) -> None:
    if shutil.which(python) is None:
        pytest.skip(f"no {python} here")
    (tmp_path / f"{module}.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(
        [python, script, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_submodules_are_told_by_their_package() -> None:
    told = missing(ModuleNotFoundError("no module", name="matplotlib.figure"))
    assert told is not None and told.hint == "pip install -e '.[plots]' in the clone of megatron-dynapipe"
