"""The patches of each version: folders of numbered patches, with the digests of the files that they change."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.files import read_bounded

FOLDER = Path(__file__).parents[1] / "patches"
PREVIOUS = "previous"
DIGESTS = "digests.json"


class FileDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One released content of a file.

    Attributes:
        releases: that have it.
        blob: git's name of the released content, by which a checkout's history may hold it.
        before: SHA-256 of it, in hexadecimal digits.
        after: SHA-256 with the whole series applied.
    """

    releases: tuple[str, ...]
    blob: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One patch.

    Attributes:
        path: of the file, in `git format-patch` form.
        subject: what it does.
        files: those it changes, relative to the checkout.
        added_lines: what it adds, in order.
        removed: lines.
    """

    path: Path
    subject: str
    files: Sequence[str]
    added_lines: Sequence[str]
    removed: int

    @property
    def added(self) -> int:
        """Lines."""
        return len(self.added_lines)

    @classmethod
    def read(cls, path: Path) -> "Patch":
        """Read a patch's header and count its lines."""
        header, _, body = path.read_text(encoding="utf-8").partition("\ndiff --git ")
        subject = re.search(r"^Subject: \[PATCH [^]]*\] (.*(?:\n .*)*)", header, re.MULTILINE)
        lines = body.splitlines()
        return cls(
            path=path,
            subject=" ".join(subject[1].split()) if subject else path.stem,
            files=tuple(dict.fromkeys(re.findall(r"^\+\+\+ b/(.*)$", body, re.MULTILINE))),
            added_lines=tuple(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ ")),
            removed=sum(line.startswith("-") and not line.startswith("--- ") for line in lines),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The patches of one or more releases, in order.

    Attributes:
        version: of the folder's name, as `core_v0.19.2`.
        patches: in the order in which they are applied.
        files: every file that they change, relative to the checkout, with each of its known contents.
        is_current: whether checkouts are patched with it; earlier releases patched with the others.
    """

    version: str
    patches: Sequence[Patch]
    files: Mapping[str, Sequence[FileDigests]]
    is_current: bool

    @property
    def releases(self) -> Sequence[str]:
        """Every release that it is for."""
        return tuple(dict.fromkeys(name for known in self.files.values() for each in known for name in each.releases))

    @classmethod
    def read(cls, folder: Path) -> "Series":
        """Read one version's folder.

        Raises:
            PatchError: its digests are missing or damaged.
        """
        try:
            files = msgspec.json.decode(read_bounded(folder / DIGESTS), type=dict[str, tuple[FileDigests, ...]])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PatchError(f"cannot read the digests of {folder}: {error}") from error
        patches = [Patch.read(path) for path in sorted(folder.glob("*.patch"))]
        is_current = folder.parent.name != PREVIOUS
        return cls(version=folder.name, patches=patches, files=files, is_current=is_current)


def load_all(folder: Path = FOLDER) -> list[Series]:
    """Every version's current series, oldest first, then those that earlier releases wrote.

    Raises:
        PatchError: there are none.
    """
    paths = [*sorted(folder.glob(f"core_v*/{DIGESTS}")), *sorted(folder.glob(f"{PREVIOUS}/core_v*/{DIGESTS}"))]
    found = [Series.read(path.parent) for path in paths]
    if not found:
        raise PatchError(
            f"no patches in {folder}",
            hint="install megatron-dynapipe again: its package holds them",
        )
    return found


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
