"""One checkout: which version's files it has, and changing all of them or none."""

import enum
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.megatron_version import version_of
from megatron_dynapipe.patching.series import Series, digest

_PACKAGE_INFO = Path("megatron/core/package_info.py")


class State(enum.StrEnum):
    """How a checkout's files stand to a series."""

    RELEASED = "as released"
    PATCHED = "patched"
    OUTDATED = "patched by an earlier release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout whose version is known and whose touched files are as released, or as patched.

    Attributes:
        folder: the one that holds `megatron/`.
        series: the patches of its version; of an outdated checkout those that are applied to it.
        state: whether they are applied.
        current: the patches to apply to it.
    """

    folder: Path
    series: Series
    state: State
    current: Series

    @property
    def is_patched(self) -> bool:
        """Whether a series is applied, the current one or an earlier release's."""
        return self.state is not State.RELEASED

    @property
    def tool(self) -> str:
        """What applies patches here."""
        return "git" if (self.folder / ".git").exists() else "patch"

    def apply(self) -> None:
        """Apply the current series; an earlier release's is reversed first.

        Raises:
            PatchError: it does not apply; nothing was changed.
        """
        assert self.state is not State.PATCHED
        with _staged(self.folder, self.current) as stage:
            if self.state is State.OUTDATED:
                self._change(stage, self.series, reverse=True)
            self._change(stage, self.current, reverse=False)
            _exchange(self.folder, stage, self.current)

    def reverse(self) -> None:
        """Reverse the applied series: the files are as released, byte for byte.

        Raises:
            PatchError: it cannot be reversed; nothing was changed.
        """
        assert self.is_patched
        with _staged(self.folder, self.series) as stage:
            self._change(stage, self.series, reverse=True)
            _exchange(self.folder, stage, self.series)

    def _change(self, stage: Path, series: Series, *, reverse: bool) -> None:
        if failure := _run(self.tool, stage, series, reverse=reverse):
            raise PatchError(f"{series.version} does not apply to {self.folder}: {failure}")
        for name, digests in series.files.items():
            expected = digests.before if reverse else digests.after
            if digest((stage / name).read_bytes()) != expected:
                raise PatchError(f"{name} differs from what was tested once patched; nothing was changed")


def examine(folder: Path, known: Sequence[Series]) -> Checkout:
    """Recognise a checkout by the digests of the files that patches touch.

    Raises:
        PatchError: it is none, of an unknown version, or its files were modified; says which, and the failing hunk.
    """
    if not (folder / "megatron").is_dir():
        raise PatchError(
            f"expected a Megatron-LM checkout in {folder}, found no folder megatron/ there",
            hint="give the folder that holds megatron/ and pretrain_gpt.py",
        )
    current = {series.version: series for series in known if series.is_current}
    for series in known:
        for state, wanted in _states(series).items():
            if series.version in current and _digests(folder, series) == wanted:
                return Checkout(folder=folder, series=series, state=state, current=current[series.version])
    raise _refusal(folder, list(current.values()))


def _states(series: Series) -> dict[State, dict[str, str]]:
    patched = {name: digests.after for name, digests in series.files.items()}
    if not series.is_current:
        return {State.OUTDATED: patched}
    return {State.RELEASED: {name: digests.before for name, digests in series.files.items()}, State.PATCHED: patched}


def _digests(folder: Path, series: Series) -> dict[str, str]:
    """Of the touched files that are there."""
    return {name: digest((folder / name).read_bytes()) for name in series.files if (folder / name).is_file()}


def _refusal(folder: Path, known: Sequence[Series]) -> PatchError:
    """Why a checkout is neither as released nor as patched: nearest to a known version, or to none."""
    said = version_of(folder / _PACKAGE_INFO) if (folder / _PACKAGE_INFO).is_file() else "no version"

    def likeness(series: Series) -> tuple[int, bool]:
        found = _digests(folder, series)
        hits = sum(found.get(name) in (files.before, files.after) for name, files in series.files.items())
        return hits, series.version == f"core_v{said}"

    nearest = max(known, key=likeness)
    versions = ", ".join(series.version for series in known)
    if likeness(nearest) == (0, False):
        return PatchError(
            f"expected a checkout of one of the versions {versions}, found one that says {said}",
            hint="check out one of these tags, or use this project's entry scripts, which patch nothing",
        )
    found, released = _digests(folder, nearest), _states(nearest)[State.RELEASED]
    modified = [name for name in released if found.get(name) != released[name]]
    problem = f"expected {nearest.version} as released, found modified: {', '.join(modified)}"
    if all((folder / name).is_file() for name in nearest.files):
        tool = "git" if shutil.which("git") else "patch"
        with _staged(folder, nearest) as stage:
            problem += f"; {_run(tool, stage, nearest, reverse=False) or 'every hunk applies all the same'}"
    return PatchError(problem, hint="restore these files (git stash, or git checkout), patch, and merge your changes")


@contextmanager
def _staged(folder: Path, series: Series) -> Iterator[Path]:
    """Copies of the touched files, in a folder of their own: what fails there leaves the checkout alone."""
    with tempfile.TemporaryDirectory(prefix="dynapipe-patch-") as name:
        stage = Path(name)
        for file in series.files:
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, stage / file)
        yield stage


def _run(tool: str, stage: Path, series: Series, *, reverse: bool) -> str:
    """Apply (or reverse) the whole series to staged files; the first complaint, empty if there is none."""
    paths = [str(patch.path.resolve()) for patch in series.patches]
    if reverse:
        paths.reverse()
    direction = ["--reverse"] if reverse else []
    if tool == "git":
        commands = [["git", "apply", *direction, path] for path in paths]
    else:
        commands = [["patch", "-p1", "--batch", "--forward", "--fuzz=0", "--input", path] for path in paths]
        if reverse:
            commands = [[word if word != "--forward" else "--reverse" for word in command] for command in commands]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(stage.parent), "LC_ALL": "C"}
    for path, command in zip(paths, commands, strict=True):
        try:
            done = subprocess.run(
                command, cwd=stage, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
        except FileNotFoundError as error:
            raise PatchError(f"the program {tool} is needed here and was not found", hint=f"install {tool}") from error
        if done.returncode:
            return f"{Path(path).name}: {_complaint(done.stdout + done.stderr)}"
    return ""


def _complaint(output: str) -> str:
    """The line of git's or patch's output that names the failing hunk."""
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if "FAILED" in line or "patch failed" in line]
    return (failed or lines or ["it does not apply"])[0]


def _exchange(folder: Path, stage: Path, series: Series) -> None:
    """Put the staged files in place of the checkout's; on any failure all of them are as they were."""
    originals: Mapping[str, bytes] = {name: (folder / name).read_bytes() for name in series.files}
    done: list[str] = []
    try:
        for name in series.files:
            done.append(name)
            _replace(folder / name, (stage / name).read_bytes())
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
