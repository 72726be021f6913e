"""The image's installation, as far as a machine without Docker allows: in a copy of the tests' environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

TIMEOUT_S = 900


def instructions() -> list[tuple[str, str]]:
    """Each instruction and what follows it, over all its lines."""
    lines = [line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in whole if line]


def test_the_image_brings_python_and_pytorch_and_all_else_is_installed() -> None:
    kinds = [kind for kind, _ in instructions()]
    assert kinds[:2] == ["ARG", "FROM"] and kinds.count("RUN") == 2 and kinds[-1] == "CMD"
    assert "list_requirements.py --without torch train data plots" in dict(reversed(instructions()))["RUN"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_its_installation_runs_beside_a_pytorch_that_is_there(tmp_path: Path) -> None:
    """PyTorch stays the environment's, the package is compiled, and `doctor` finds that it can train."""
    environment, checkout = tmp_path / "environment", tmp_path / "checkout"
    venv = Path(sys.prefix)
    same_disk = venv.stat().st_dev == tmp_path.stat().st_dev
    subprocess.run(["cp", "-al" if same_disk else "-a", venv, environment], check=True)
    checkout.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", checkout], input=archive, check=True)
    installs = next(words for kind, words in instructions() if kind == "RUN")
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", "--quiet", "megatron-dynapipe"], check=True)
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", installs.replace("/tmp/requirements.txt", str(tmp_path / "requirements"))],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "torch" not in (tmp_path / "requirements").read_text().split()
