"""A wheel of this checkout, installed where nothing else is: it needs no compiler, and plans."""

import os
import venv
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run, run_python


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_installs_without_a_compiler_and_plans(tmp_path: Path) -> None:
    """As `cibuildwheel` does it for each Python: what the package requires comes from the index, in wheels alone."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    run_python(*command, timeout_s=900)
    (wheel,) = tmp_path.glob("*.whl")
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    alone = {"PATH": str(bare / "bin"), "CC": "", "CXX": "", "PYTHONPATH": ""}
    pip = [bare / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    lock = tmp_path / "lock.txt"  # constraints name no extras
    lock.write_text((ROOT / "requirements.lock").read_text().replace("[training]", ""))
    run(*pip, "--constraint", lock, wheel, "pytest", timeout_s=600, **alone)
    tests = tmp_path / "installed"
    tests.symlink_to(ROOT / "tests" / "installed")
    done = run(bare / "bin" / "python", "-m", "pytest", "-c", os.devnull, tests, cwd=tmp_path, timeout_s=600, **alone)
    assert " passed" in done.stdout and " skipped" not in done.stdout
