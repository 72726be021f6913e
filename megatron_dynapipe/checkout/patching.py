"""Patches on a Megatron-LM checkout: each file is known by its content, and changed so that it can be changed back.

    as released ──── git apply ──────▶ patched
    modified ─── git apply --3way ───▶ patched, with changes

Nothing is recorded in the checkout: what a file is follows from its bytes. A command that was killed is repeated or
reversed, and the way back is tried before anything is written.
"""

import enum
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_dynapipe.checkout.version import version_of
from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.outputs import replace_bytes

FOLDER = Path(__file__).parents[1] / "patches"
DIGESTS = "digests.json"
_TIMEOUT_S = 60


class State(enum.StrEnum):
    """How a file, or a whole checkout, stands to a series."""

    RELEASED = "as released"
    PATCHED = "patched"
    MERGED = "patched, with changes"
    PARTLY = "patched in part"
    MODIFIED = "modified"
    MISSING = "missing"


UNKNOWN = (State.MISSING, State.PARTLY, State.MODIFIED)


class Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One released content of a file: the releases that have it, git's name of it as a blob, and of it patched."""

    releases: tuple[str, ...]
    released: str
    patched: str


class Patch(NamedTuple):
    """One patch, in `git format-patch` form: what it does, the file that it adds lines to, and these lines."""

    path: Path
    subject: str
    file: str
    added: Sequence[str]


class Series(NamedTuple):
    """The patches of one or more releases, in order, and each known content of the files that they change."""

    version: str
    patches: Sequence[Patch]
    files: Mapping[str, Sequence[Content]]

    @property
    def releases(self) -> Sequence[str]:
        """Every release that it is for."""
        return tuple(
            dict.fromkeys(name for contents in self.files.values() for content in contents for name in content.releases)
        )


class Survey(NamedTuple):
    """A checkout as one series knows it: its folder, and the version it says.

    Of each file that the series changes there is how it stands, and of a known content the releases that have it.
    """

    folder: Path
    says: str
    series: Series
    files: Mapping[str, tuple[State, Sequence[str]]]

    @property
    def state(self) -> State:
        """The state of all files: the one that they share, or what they are together."""
        states = {state for state, _ in self.files.values()}
        if len(states) == 1:
            return states.pop()
        mixed = State.MERGED if states == {State.PATCHED, State.MERGED} else State.PARTLY
        return next((state for state in (State.MISSING, State.MODIFIED) if state in states), mixed)

    def named(self, *states: State) -> list[str]:
        """The files in one of these states."""
        return [name for name, (state, _) in self.files.items() if state in states]


def load_all(folder: Path = FOLDER) -> list[Series]:
    """Every series, the oldest first.

    Raises:
        PatchError: there are none.
    """
    series = []
    for path in sorted(folder.glob(f"core_v*/{DIGESTS}")):
        files = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[Content, ...]])
        patches = [read_patch(patch) for patch in sorted(path.parent.glob("*.patch"))]
        series.append(Series(path.parent.name, patches, files))
    if not series:
        raise PatchError(f"no patches in {folder}", hint="install megatron-dynapipe again: its package holds them")
    return series


def read_patch(path: Path) -> Patch:
    """A patch's header, and the lines that it adds to its file."""
    header, _, body = path.read_text(encoding="utf-8").partition("\ndiff --git ")
    subject = re.search(r"^Subject: \[PATCH [^]]*\] (.*(?:\n .*)*)", header, re.MULTILINE)
    (file,) = re.findall(r"^\+\+\+ b/(.*)$", body, re.MULTILINE)
    added = re.findall(r"^\+(?!\+\+ )(.*)$", body, re.MULTILINE)
    return Patch(path, " ".join(subject[1].split()) if subject else path.stem, file, added)


def survey(folder: Path) -> list[Survey]:
    """A checkout as each series knows it that knows the most of its files; the newest series first.

    Raises:
        PatchError: the folder holds no Megatron.
    """
    if not (folder / "megatron").is_dir():
        raise PatchError(
            f"expected a Megatron-LM checkout in {folder}, found no folder megatron/ there",
            hint="give the folder that holds megatron/ and pretrain_gpt.py",
        )
    info = folder / "megatron" / "core" / "package_info.py"
    says = version_of(info) if info.is_file() else "no version"
    surveys = [
        Survey(folder, says, series, {name: _report(series, folder, name) for name in series.files})
        for series in reversed(load_all())
    ]
    distances = [(len(known.named(*UNKNOWN)), len(known.named(State.MERGED))) for known in surveys]
    return [known for known, distance in zip(surveys, distances, strict=True) if distance == min(distances)]


def _report(series: Series, folder: Path, name: str) -> tuple[State, Sequence[str]]:
    """How a file of a checkout stands to a series, and the releases that have its content."""
    if not (folder / name).is_file():
        return State.MISSING, ()
    data = (folder / name).read_bytes()
    for content in series.files[name]:
        for state, blob in ((State.RELEASED, content.released), (State.PATCHED, content.patched)):
            if blob == blob_name(data):
                return state, content.releases
    lines = data.decode(errors="replace").splitlines()
    added = [line for patch in series.patches if patch.file == name for line in patch.added if line]
    if all(lines.count(line) >= added.count(line) for line in added):
        return State.MERGED, ()
    return (State.PARTLY if any("megatron_dynapipe" in line for line in lines) else State.MODIFIED), ()


def change(folder: Path, *, reverse: bool = False, merge: bool = False) -> list[str]:
    """Patch a checkout's files, or take the patches out of them: all or, on an error, none.

    Args:
        folder: that holds `megatron/`.
        reverse: take the patches out; changes beside them stay.
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
    """One file with its patches, or in `reverse` without them."""
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
        self._folder, self._name = folder, name
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


def blob_name(data: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


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
    if len(checkout.named(*UNKNOWN)) == len(checkout.files):
        releases = ", ".join(name for series in load_all() for name in series.releases)
        return PatchError(
            f"expected a checkout of one of the releases {releases}, found one that says {checkout.says},"
            " of which no file is known",
            hint="check out one of these; or --merge; or put the checkout first on PYTHONPATH and use this project's"
            " entry scripts, which patch nothing",
        )
    if checkout.named(State.MISSING):
        return PatchError(problem, hint="check out the whole of Megatron-LM")
    try:
        _contents(checkout, reverse=False, merge=True)
    except PatchError as error:
        return PatchError(f"{problem}; {error.message}", hint=error.hint)
    hint = "--merge merges the patches with your changes; or set these aside (git stash), patch, and put them back"
    return PatchError(problem, hint=hint)
