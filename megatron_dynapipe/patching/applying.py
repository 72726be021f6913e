"""Applying patches to copies of a checkout's files, and putting the copies in place: all of them or none."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.patching.series import Patch

TIMEOUT_S = 60


@contextmanager
def staged(contents: Mapping[str, bytes]) -> Iterator[Path]:
    """Files in a folder of their own: what fails there leaves the checkout alone."""
    with tempfile.TemporaryDirectory(prefix="dynapipe-patch-") as name:
        stage = Path(name)
        for file, data in contents.items():
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            (stage / file).write_bytes(data)
        yield stage


def run_patches(tool: str, stage: Path, patches: Sequence[Patch], *, reverse: bool) -> str:
    """Apply (or reverse) patches to staged files; the first complaint, empty if there is none.

    Raises:
        PatchError: the program `tool` (git or patch) is not there.
    """
    paths = [str(patch.path.resolve()) for patch in patches]
    if reverse:
        paths.reverse()
    direction = ["--reverse"] if reverse else []
    if tool == "git":
        commands = [["git", "apply", *direction, path] for path in paths]
    else:
        forward = direction or ["--forward"]
        commands = [["patch", "-p1", "--batch", *forward, "--fuzz=0", "--input", path] for path in paths]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(stage.parent), "LC_ALL": "C"}
    for path, command in zip(paths, commands, strict=True):
        done = run_tool(command, stage, environment)
        if done.returncode:
            return f"{Path(path).name}: {_complaint((done.stdout + done.stderr).decode(errors='replace'))}"
    return ""


def run_tool(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """One call of git or patch.

    Raises:
        PatchError: the program is not there.
    """
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        tool = command[0]
        raise PatchError(f"the program {tool} is needed here and was not found", hint=f"install {tool}") from error


def _complaint(output: str) -> str:
    """The line of git's or patch's output that names the failing hunk."""
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if "FAILED" in line or "patch failed" in line]
    return (failed or lines or ["it does not apply"])[0]


def exchange(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Put contents in place of the checkout's files; on any failure all of them are as they were."""
    originals = {name: (folder / name).read_bytes() for name in contents}
    done: list[str] = []
    try:
        for name, data in contents.items():
            done.append(name)
            _replace(folder / name, data)
    except BaseException:
        for name in done:
            _replace(folder / name, originals[name])
        raise


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, with the mode of the one it replaces."""
    fresh = path.with_name(f".{path.name}.dynapipe")
    try:
        fresh.write_bytes(data)
        shutil.copymode(path, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
