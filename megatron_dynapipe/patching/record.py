"""What a merge leaves in a checkout, so that it is recognised and can be reversed byte for byte."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.files import read_bounded

FOLDER = ".megatron-dynapipe"
FORMAT = "dynapipe-merge/1"


class MergeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One merge.

    Attributes:
        format: of this file.
        version: of the series that was merged.
        is_tried: whether the smoke test has passed.
        files: SHA-256 of every touched file with the patches merged in.
    """

    format: str = FORMAT
    version: str
    is_tried: bool
    files: dict[str, str]

    @staticmethod
    def read(folder: Path) -> "MergeRecord | None":
        """That of a checkout, if it has one.

        Raises:
            PatchError: it is damaged.
        """
        path = folder / FOLDER / "merged.json"
        if not path.is_file():
            return None
        try:
            found = msgspec.json.decode(read_bounded(path), type=MergeRecord)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PatchError(f"cannot read {path}: {error}", hint=f"restore the files of {path.parent}") from error
        if found.format != FORMAT:
            raise PatchError(f"expected the format {FORMAT} in {path}, found {found.format}")
        return found

    def write(self, folder: Path, originals: Mapping[str, bytes] | None = None) -> None:
        """Keep it in the checkout, with what the files were; git does not see the folder."""
        own = folder / FOLDER
        own.mkdir(exist_ok=True)
        (own / ".gitignore").write_text("*\n", encoding="utf-8")
        for name, data in (originals or {}).items():
            (own / "originals" / name).parent.mkdir(parents=True, exist_ok=True)
            (own / "originals" / name).write_bytes(data)
        (own / "merged.json").write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    def describes(self, digests: Mapping[str, str]) -> bool:
        """Whether files with these digests are those that were merged."""
        return self.files == digests

    def originals(self, folder: Path) -> dict[str, bytes]:
        """What the files were before."""
        return {name: (folder / FOLDER / "originals" / name).read_bytes() for name in self.files}

    @staticmethod
    def remove(folder: Path) -> None:
        """Forget the merge."""
        shutil.rmtree(folder / FOLDER)
