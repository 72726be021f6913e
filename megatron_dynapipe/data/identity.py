"""Which dataset this is: digests of its files, compared with its manifest and with other nodes' digests.

Each sample has a checksum, too, which is compared whenever it is read; `data verify` reads them all.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.digests import file_digest
from megatron_dynapipe.sampling import spans_path
from megatron_dynapipe.sampling.lengths import data_path, ends_path, index_path, task_ids_path


class FileDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a dataset in its manifest.

    Attributes:
        quick: its digest, as `file_digest`.
        whole: digest of everything; not written any more.
    """

    size: int
    quick: str
    whole: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """A manifest's entry of a file; raises as `file_digest`."""
        return cls(quick=file_digest(path), size=path.stat().st_size)


def checksums_path(prefix: Path) -> Path:
    """The file in which a split keeps each sample's checksum: uint32[samples], CRC-32 of the bytes of its tokens."""
    return prefix.with_name(prefix.name + ".crc32.npy")


def lost_path(prefix: Path) -> Path:
    """The file that says what was not written of samples: uint64[samples], a bit for each name in the manifest."""
    return prefix.with_name(prefix.name + ".lost.npy")


def manifest_path(folder: Path) -> Path:
    """Where a dataset folder describes itself."""
    return folder / "manifest.json"


def files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split that are there."""
    return [path for path in names_of(folder, split) if path.exists()]


def names_of(folder: Path, split: str) -> tuple[Path, ...]:
    """All files that a split may have."""
    prefix = folder / split
    arrays = task_ids_path(folder, split), checksums_path(prefix), spans_path(prefix), ends_path(prefix)
    return data_path(prefix), index_path(prefix), *arrays, lost_path(prefix)


def check_files(folder: Path, splits: Iterable[str], manifest: Mapping[str, FileDigests]) -> dict[str, str]:
    """The digest of every file of some splits, by name, each equal to the manifest's where that has it.

    Raises:
        DataError: a file has changed since the dataset was made, or cannot be read.
    """
    digests = {path.name: file_digest(path) for split in splits for path in files_of(folder, split)}
    for name, digest in digests.items():
        if name in manifest and digest != manifest[name].quick:
            raise changed_file(folder / name, manifest[name].quick, digest)
    return digests


def changed_file(path: Path, expected: str, actual: str) -> DataError:
    """The error of a file that is not the manifest's."""
    return DataError(
        f"{path}: expected the file that {manifest_path(path.parent).name} describes (digest {expected}), found"
        f" another (digest {actual})",
        hint="it was overwritten or copied badly: copy it again, or make the dataset again with `data prepare`; "
        "`data verify` checks every file and sample",
    )


def folder_digest(folder: Path) -> str:
    """32 hexadecimal digits of the names and contents of a folder's own files, as a tokenizer's; raises as above."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            state.update(f"{path.name}\0{file_digest(path)}\0".encode())
    return state.hexdigest()


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits of what a tokenizer encodes to, from its folder: equal wherever it was loaded from."""
    tokens = folder / "tokenizer.json"
    if not tokens.is_file():
        return folder_digest(folder)
    special = folder / "tokenizer_config.json"
    config = json.loads(special.read_bytes()) if special.is_file() else {}
    kept = {name: str(value) for name, value in config.items() if name.endswith(("_token", "chat_template"))}
    state = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    state.update(file_digest(tokens).encode())
    return state.hexdigest()
