"""Patching a Megatron-LM checkout so that it can be changed back.

    as released ──── git apply ──────▶ patched
    modified ─── git apply --3way ───▶ patched, with changes

A command that was killed is repeated or reversed, and the way back is tried before anything is written.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dynapipe.checkout.survey import UNKNOWN, State, Survey, load_all, survey
from megatron_dynapipe.core.errors import PatchError
from megatron_dynapipe.outputs import replace_bytes

_TIMEOUT_S = 60


def change(folder: Path, *, reverse: bool = False, merge: bool = False) -> list[str]:
    """Patch a checkout's files, or take the patches out of them: all or, on an error, none.

    Args:
        folder: that holds `megatron/`.
        reverse: take the patches out; other changes stay.
        merge: whether files that are modified may be merged with the patches.

    Returns:
        The files that were changed; those that were so already are left alone.

    Raises:
        PatchError: a file is not known, or cannot be changed so that the way back gives the same bytes.
        OSError: a file cannot be written.
    """
    reasons = []
    for known in survey(folder):
        try:
            contents = _contents(known, reverse=reverse, merge=merge)
        except PatchError as error:
            reasons.append(error)
            continue
        _replace(folder, contents)
        return list(contents)
    raise reasons[0]


def _contents(checkout: Survey, *, reverse: bool, merge: bool) -> dict[str, bytes]:
    wrong = UNKNOWN[:2] if reverse or merge else UNKNOWN
    if checkout.named(*wrong):
        raise refusal(checkout)
    todo = (State.PATCHED, State.MERGED) if reverse else (State.RELEASED, State.MODIFIED)
    return {name: _changed(checkout, name, reverse=reverse) for name in checkout.named(*todo)}


def _changed(checkout: Survey, name: str, *, reverse: bool) -> bytes:
    patches = [patch.path.resolve() for patch in checkout.series.patches if patch.file == name]
    data = (checkout.folder / name).read_bytes()
    with tempfile.TemporaryDirectory(prefix="dynapipe-patch-") as folder:
        stage = _Stage(Path(folder), name)
        for released in _history(checkout, name):
            stage.apply(patches, released)  # leaves the contents between two patches for three-way merges
        changed = stage.apply(patches, data, reverse=reverse)
        if stage.apply(patches, changed, reverse=not reverse) == data:
            return changed
    raise PatchError(
        f"{name}: the way back would not give the same bytes; nothing was changed",
        hint="your changes and the patches hold the same lines: undo these of yours first",
    )


def _history(checkout: Survey, name: str) -> list[bytes]:
    """The released contents of a file that the checkout's history holds."""
    objects = [_git(checkout.folder, "cat-file", "blob", content.released) for content in checkout.series.files[name]]
    return [blob.stdout for blob in objects if blob.returncode == 0]


class _Stage:
    """A git repository of one file, in which patches are tried; the user's settings do not reach it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        self._settings = home | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
        (folder / name).parent.mkdir(parents=True)
        _git(folder, "init", "--quiet", **self._settings)

    def apply(self, patches: Sequence[Path], data: bytes, *, reverse: bool = False) -> bytes:
        """The content with the patches in it, or in `reverse` without; three-way where it is known what they change.

        Raises:
            PatchError: one does not apply, or conflicts with the content.
        """
        path = self._folder / self._name
        path.write_bytes(data)
        _git(self._folder, "add", self._name, **self._settings)
        for patch in reversed(patches) if reverse else patches:
            command = ["apply", "--3way", *(["--reverse"] if reverse else []), str(patch)]
            done = _git(self._folder, *command, **self._settings)
            if done.returncode:
                output = done.stderr.decode(errors="replace").strip()
                conflict = f"your changes of {self._name} conflict with it"
                failed = [line.removeprefix("error: ") for line in output.splitlines() if "patch failed" in line]
                reason = conflict if "with conflicts" in output else (failed or [output])[0]
                raise PatchError(
                    f"{patch.name}: {reason}; nothing was changed",
                    hint=f"apply the patches of {patch.parent} by hand: a run checks at its start that every call is"
                    " there. Three-way merges need a git history with the released file (git fetch --unshallow --tags)",
                )
        return path.read_bytes()


def _git(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = inherited | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"} | settings
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise PatchError("the program git is needed here and was not found", hint="install git") from error
    except subprocess.TimeoutExpired as error:
        raise PatchError(f"git {arguments[0]} did not end within {_TIMEOUT_S} s in {folder}") from error


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write each file whole; on a failure all are as they were. Symbolic links stay."""
    before = {name: (folder / name).read_bytes() for name in contents}
    try:
        for name, data in contents.items():
            replace_bytes(folder / name, data)
    except BaseException:
        for name, data in before.items():
            if (folder / name).read_bytes() != data:
                replace_bytes(folder / name, data)
        raise


def refusal(checkout: Survey) -> PatchError:
    """Why a checkout is not patched, or reversed, as it is."""
    files = "; ".join(f"{state}: {', '.join(names)}" for state in UNKNOWN if (names := checkout.named(state)))
    problem = f"expected {checkout.series.version} as released or patched, found {files}"
    if checkout.named(State.PARTLY):
        hint = "take DynaPipe's lines out of these files by hand, or set the files aside (git stash); then patch again"
        return PatchError(problem, hint=hint)
    if checkout.named(State.MISSING):
        return PatchError(problem, hint="check out the whole of Megatron-LM")
    if len(checkout.named(*UNKNOWN)) == len(checkout.files):
        releases = ", ".join(name for series in load_all() for name in series.releases)
        return PatchError(
            f"expected a checkout of one of the releases {releases}, found one that says {checkout.says},"
            " none of whose files are known",
            hint="check out one of these; or --merge; or put the checkout first on PYTHONPATH and use this project's"
            " entry scripts, which patch nothing",
        )
    try:
        _contents(checkout, reverse=False, merge=True)
    except PatchError as error:
        return PatchError(f"{problem}; {error.message}", hint=error.hint)
    hint = "--merge merges the patches with your changes; or set these aside (git stash), patch, and put them back"
    return PatchError(problem, hint=hint)
