"""How the files of a Megatron-LM checkout stand to the patches: known by their content, nothing is recorded there.

`tools.patch` applies the patches and takes them out.
"""

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_dynapipe.checkout.version import version_of
from megatron_dynapipe.core.errors import PatchError

FOLDER = Path(__file__).parents[1] / "patches"
DIGESTS = "digests.json"
_CALL = re.compile(r"\bdynapipe\.\w+\(")
"""More of them than a series adds are another series'; taking its own out would leave them without their import."""


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
    calls, own = (sum(bool(_CALL.search(line)) for line in text) for text in (lines, added))
    if calls == own and all(lines.count(line) >= added.count(line) for line in added):
        return State.MERGED, ()
    return (State.PARTLY if any("megatron_dynapipe" in line for line in lines) else State.MODIFIED), ()


def blob_name(data: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
