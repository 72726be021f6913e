"""The set-up that `make` runs: finding a Python that really runs, and refusals."""

import importlib.util
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run, run_python

FIND_PYTHON = ROOT / "scripts" / "find-python.sh"
ZIGLANG = re.search(r'^ZIGLANG = "(.*)"', (ROOT / "scripts" / "build_backend.py").read_text(), re.MULTILINE)[1]
TWO_GROUPS = "# --- run: this\npip==1\n\n# --- check: that\npytest==1\nruff==1\n"
LIBRARY = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"

REFUSING_SHIM = "echo 'pyenv: python3.12: command not found' >&2; exit 127"
TOO_OLD = "exit 1"  # the probe's own answer on another version
HALF_INSTALLED = "echo 'No module named ensurepip' >&2; exit 1"


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def good(name: str) -> str:
    return f"echo /opt/{name}"


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the finder where only tmp_path/bin (and the system's tools, no system Python) can be found."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "env", "ls", "sh"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    environment = {"PATH": f"{tmp_path / 'bin'}:{tools}", "HOME": str(tmp_path / "home"), **environment}
    return subprocess.run(["bash", FIND_PYTHON], env=environment, capture_output=True, text=True, timeout=30)


@pytest.fixture
def no_system_python() -> None:
    if any(Path("/usr/bin", name).exists() for name in ("python3.12", "python3.13")) or any(
        Path("/usr/local/bin", name).exists() for name in ("python3.12", "python3.13")
    ):
        pytest.skip("this system's own Python would be found")


@pytest.mark.parametrize(
    ("pythons", "expected"),
    [
        ({"python3.12": good("a"), "python3.13": good("b")}, "/opt/a"),
        ({"python3.12": REFUSING_SHIM, "python3.13": good("b")}, "/opt/b"),
        ({"python3.12": HALF_INSTALLED, "python3": good("c")}, "/opt/c"),
        ({"python3": TOO_OLD, "python": good("d")}, "/opt/d"),
    ],
)
def test_first_python_on_path_that_runs_is_taken(tmp_path: Path, pythons: dict[str, str], expected: str) -> None:
    for name, body in pythons.items():
        fake_python(tmp_path / "bin" / name, body)
    done = find_python(tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, expected, "")


def test_pyenv_is_looked_into_where_shims_refuse(tmp_path: Path) -> None:
    for name in ("python3.12", "python3.13", "python3"):
        fake_python(tmp_path / "bin" / name, REFUSING_SHIM)
    fake_python(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3", good("home"))
    assert find_python(tmp_path).stdout.strip() == "/opt/home"
    root = tmp_path / "a pyenv with spaces"
    fake_python(root / "versions" / "3.11.7" / "bin" / "python3", good("old"))
    fake_python(root / "versions" / "3.13.0" / "bin" / "python3", good("new"))
    assert find_python(tmp_path, PYENV_ROOT=str(root)).stdout.strip() == "/opt/new"


def test_real_interpreter_passes_the_probe(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.12").symlink_to(Path(sys.executable).resolve())
    python = find_python(tmp_path).stdout.strip()
    assert subprocess.run([python, "-c", ""], check=False, timeout=30).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with just what set-up reads."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for script in ("build_backend.py", "find-python.sh", "hashed.awk", "setup.sh"):
        (root / "scripts" / script).symlink_to(ROOT / "scripts" / script)
    (root / "requirements.sha256").write_text("# of no wheel\n")
    fake_python(root / "bin" / "c++", "exit 0")
    return root


def set_up(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": "", "HOME": str(checkout)}
    return run("bash", checkout / "scripts" / "setup.sh", *arguments, status=None, **environment)


@pytest.mark.usefixtures("no_system_python")
def test_set_up_without_python_stops_with_the_finders_words(checkout: Path) -> None:
    fake_python(checkout / "bin" / "python3.12", REFUSING_SHIM)
    fake_python(checkout / "bin" / "python3", TOO_OLD)
    done = set_up(checkout)
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: no Python 3.12 or 3.13 that runs") and hint.startswith("hint: install one")
    assert not (checkout / ".venv").exists()


def test_environment_of_another_python_is_left_alone(checkout: Path) -> None:
    old = checkout / ".venv" / "bin" / "python"
    fake_python(old, 'case "$*" in *pip*) exit 0;; -V) echo Python 3.10.4;; *) exit 1;; esac')
    done = set_up(checkout)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: .venv holds Python 3.10.4, needed is Python 3.12 or 3.13",
        "hint: move .venv away and run this again",
    ]
    assert old.exists()


def test_full_disk_is_told_before_the_download(checkout: Path) -> None:
    fake_python(checkout / ".venv" / "bin" / "python", 'case "$*" in *torch*) exit 1;; *) exit 0;; esac')
    fake_python(checkout / "bin" / "df", "echo header; echo / 100 50 2000000 3% /")
    (checkout / "requirements.lock").write_text(TWO_GROUPS)
    done = set_up(checkout)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1] == "error: 2 GB free here, set-up needs 9 GB"


def test_failed_install_is_told_and_tried_again_from_a_new_environment(checkout: Path) -> None:
    fake_python(checkout / ".venv" / "bin" / "python", 'case "$*" in *"pip install"*) exit 1;; *) exit 0;; esac')
    (checkout / "requirements.lock").write_text(TWO_GROUPS)
    first = set_up(checkout)
    assert first.returncode == 2
    assert first.stderr.splitlines()[0] == "setup: step 2 of 6: downloading and installing 1 pinned packages (run)"
    assert first.stderr.splitlines()[1] == "error: pip could not install the packages of requirements.lock"
    # The second time nothing of the half-unpacked environment is trusted.
    fake_python(checkout / "bin" / "python3.12", 'case "$*" in -m*) echo made anew >&2; exit 1;; *) echo "$0";; esac')
    assert "the last set-up did not finish" in (second := set_up(checkout)).stderr
    assert "made anew" in second.stderr


DEMO_DATA = "megatron_dynapipe/tools/demo_data.py"


def write_inputs(checkout: Path) -> None:
    """What the steps read to know whether they have been done."""
    inputs = "requirements.lock", "pyproject.toml", "setup.py", "megatron_dynapipe/data/meta.py", DEMO_DATA
    for file in (*inputs, "patches/versions.txt"):
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text(TWO_GROUPS)


def test_steps_run_once_and_again_when_their_inputs_change(checkout: Path) -> None:
    write_inputs(checkout)
    fake_python(checkout / ".venv" / "bin" / "python", 'case "$*" in *"data demo"*) mkdir .demo/data;; esac; exit 0')
    run, project, demo, check, wheels = (
        "downloading and installing 1 pinned packages (run)",
        "building and installing megatron-dynapipe (editable)",
        "building the demo data in .demo/data",
        "downloading and installing 2 pinned packages (check)",
        "fetching the Megatrons that patches/ are tested on (5 MB)",
    )

    def said(*arguments: str, at: Path = checkout, steps: int = 6) -> list[str]:
        done = set_up(at, *arguments)
        assert done.returncode == 0, done.stderr
        lines = done.stderr.splitlines()
        assert all(re.match(rf"setup: step \d of {steps}: ", line) for line in lines)
        return [line.split(": ", 2)[2] for line in lines]

    assert said("run", steps=4) == [run, project, demo]
    assert said() == [check, wheels]
    assert said() == said("run") == []
    (checkout / DEMO_DATA).write_text(f"{TWO_GROUPS}# changed\n")
    assert said() == [demo]
    (checkout / "setup.py").write_text(f"{TWO_GROUPS}# changed\n")
    assert said() == [project]
    (checkout / ".venv" / ".setup" / "project").unlink()
    assert said() == [project]
    moved = checkout.rename(checkout.with_name("elsewhere"))
    assert said(at=moved) == [run, project, demo, check, wheels]


def test_pips_output_becomes_a_count(checkout: Path) -> None:
    (checkout / "requirements.lock").write_text(TWO_GROUPS)
    body = (
        'case "$*" in *"--no-deps -r"*) printf "Collecting torch==1\\n  Downloading torch-1.whl (530.1 MB)\\n'
        'Installing collected packages: torch\\nSuccessfully installed torch\\n";; *editable*) exit 1;; esac'
    )
    fake_python(checkout / ".venv" / "bin" / "python", body)
    assert set_up(checkout).stderr.splitlines()[1:3] == [
        "setup:   1 of 1: torch-1.whl (530.1 MB)",
        "setup:   unpacking all of them, which takes minutes where torch is among them",
    ]


def test_where_no_compiler_works_one_is_fetched(checkout: Path) -> None:
    fake_python(checkout / "bin" / "c++", "exit 1")
    (checkout / "requirements.lock").write_text(TWO_GROUPS)
    for file in ("pyproject.toml", "setup.py"):
        (checkout / file).touch()
    body = (
        f'echo "$*" >>{shlex.quote(str(checkout))}/ran; '
        f'case "$*" in *"import ziglang"*|*editable*) exit 1;; *build_backend*) echo {ZIGLANG};; esac'
    )
    fake_python(checkout / ".venv" / "bin" / "python", body)
    done = set_up(checkout)
    assert "setup: no C++20 compiler works here; fetching one (ziglang, 100 MB)" in done.stderr.splitlines()
    installs = [line for line in (checkout / "ran").read_text().splitlines() if "pip install" in line]
    assert [line for line in installs if ZIGLANG in line] == [installs[-2]]  # before the project, after the packages


def test_without_a_network_the_wheels_of_patches_are_done_without(checkout: Path) -> None:
    write_inputs(checkout)
    (checkout / "patches" / "versions.txt").write_text("megatron-core==0.19.2\n")
    body = 'case "$*" in *"pip download"*) exit 1;; *"data demo"*) mkdir .demo/data;; esac; exit 0'
    fake_python(checkout / ".venv" / "bin" / "python", body)
    done = set_up(checkout)
    assert done.returncode == 0
    assert "notice: megatron-core==0.19.2 could not be fetched; the tests that need it are skipped" in done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with just what a build reads, and a library of older sources."""
    (tmp_path / "scripts").mkdir()
    for file in ("setup.py", "pyproject.toml", "LICENSE", "NOTICE", "scripts/build_backend.py"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    (tmp_path / "README.md").touch()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bindings.cpp").write_text("#error broken on purpose")
    core = tmp_path / "megatron_dynapipe" / "core"
    core.mkdir(parents=True)
    for file in (core.parent / "__init__.py", core / "__init__.py"):
        file.write_text('__version__ = "0"\n')
    (core / LIBRARY).touch()
    return tmp_path


def build(project: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build where `ziglang` is not installed, or is the folder beside the project."""
    environment = {"CC": "false", "CXX": "false", "PYTHONPATH": str(project / "packages")} | environment
    words = ("setup.py", "build_ext", *(options or ["--inplace"]))
    return run_python(*words, cwd=project, status=None, **environment)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="ziglang is installed")
def test_install_stops_where_no_compiler_works(project: Path) -> None:
    done = build(project)
    assert done.returncode == 1
    *_, error, hint = done.stderr.splitlines()
    assert error == "error: the planner's native core could not be built: no C++20 compiler works here"
    assert hint.startswith("hint: install a C++20 compiler and the headers of this Python")
    assert f"pip install {ZIGLANG}" in hint


@pytest.mark.parametrize(("options", "stays"), [([], False), (["--build-lib", "build/lib"], True)])
def test_a_build_that_fails_stops_and_leaves_no_older_library(project: Path, options: list[str], stays: bool) -> None:
    """But that of a checkout in which a wheel is built. The compiler works, except on our source."""
    tries = 'case "$*" in *bindings.cpp*) exit 1;; esac; while [ "$1" != -o ]; do shift; done; echo >"$2"'
    fake_python(project / "c++", tries)
    done = build(project, *options, CXX=str(project / "c++"), CC=str(project / "c++"))
    assert done.returncode == 1
    assert "error: the planner's native core could not be built: command" in done.stderr
    assert (project / "megatron_dynapipe" / "core" / LIBRARY).exists() == stays


def test_zig_compiles_and_links_where_the_machines_compiler_does_not_work(project: Path) -> None:
    zig = project / "packages" / "ziglang"
    zig.mkdir(parents=True)
    (zig / "__init__.py").touch()
    (zig / "__main__.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()\n"
        "pathlib.Path('ran').open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    )
    done = build(project)
    assert done.returncode == 0, done.stderr
    compiled, linked = [line for line in (project / "ran").read_text().splitlines() if "nb_combined.cpp" not in line]
    assert compiled.startswith("c++ -fno-sanitize=undefined") and "csrc/bindings.cpp" in compiled
    assert linked.startswith("c++ -fno-sanitize=undefined") and "-shared" in linked


def test_a_compiler_is_required_only_where_none_works() -> None:
    for compiler, expected in (("false", [ZIGLANG]), (f"{sys.executable} -c pass", [])):
        done = run_python("scripts/build_backend.py", status=None, CXX=compiler)
        assert done.stdout.split() == expected, done.stderr


def test_downloads_say_how_far_they_are() -> None:
    """pip's raw progress comes four times a second."""
    torch = [f"Progress {done} of 880000000" for done in (0, 30_000_000, 90_000_000, 95_000_000, 880_000_000)]
    said = ["Collecting torch==2", "  Downloading torch-2.whl (880 MB)", *torch]
    said += ["Collecting tiny==1", "  Downloading tiny-1.whl (9 kB)", "Progress 0 of 9000", "Progress 9000 of 9000"]
    script = """say() { echo "$*"; }; source <(sed -n '/^show_progress()/,/^}/p' scripts/setup.sh); show_progress 2"""
    done = run("bash", "-euc", script, stdin="\n".join(said) + "\n")
    assert done.stdout.splitlines() == [
        "  1 of 2: torch-2.whl (880 MB)",
        "    90 of 880 MB",
        "    880 of 880 MB",
        "  2 of 2: tiny-1.whl (9 kB)",
    ]


def test_bridges_programs_are_those_of_its_own_environment(tmp_path: Path) -> None:
    """A copy by hard links, whose programs and `activate` name it, and not the environment that it was copied from."""
    named = ("scripts/setup_beside.sh", "scripts/hashed.awk", "requirements.lock", "requirements-bridge.lock")
    for name in (*named, "requirements.sha256", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".demo").mkdir()
    fake_python(tmp_path / ".venv/bin/python", 'for file; do :; done; grep == "$file" >asked')
    programs = {"torchrun": f"#!{tmp_path}/.venv/bin/python\n", "activate": f'export VIRTUAL_ENV="{tmp_path}/.venv"\n'}
    for name, text in programs.items():
        (tmp_path / ".venv/bin" / name).write_text(text)
    run("bash", str(tmp_path / "scripts/setup_beside.sh"), "bridge")
    for name, text in programs.items():
        assert (tmp_path / ".venv/bin" / name).read_text() == text
        assert (tmp_path / ".venv-bridge/bin" / name).read_text() == text.replace("/.venv", "/.venv-bridge")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) > 30 and all(" --hash=sha256:" in line for line in asked), "pip compares digests"
