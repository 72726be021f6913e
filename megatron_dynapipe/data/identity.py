"""Which dataset this is: digests of its files, held against its manifest and against those of other nodes.

    up to 2 GB   ████████████████████████    the whole file
    above        ██ · █ · █ · █ · █ · ██     its size, head, tail and blocks at fixed places: about a second

Each sample is checked when it is read, and `data verify` reads everything.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import open_regular
from megatron_dynapipe.sampling.index_file import data_path, index_path
from megatron_dynapipe.sampling.lengths import task_ids_path

WHOLE_BYTES = 2_000_000_000
"""Files of at most this size are read whole: two or three seconds."""
BLOCK_BYTES = 1_000_000
BLOCKS = 512
_CHUNK_BYTES = 2**22


class FileDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a dataset in its manifest.

    Attributes:
        size: bytes.
        quick: digest of the parts that are read when a run starts.
        whole: digest of everything.
    """

    size: int
    quick: str
    whole: str


def checksums_path(prefix: Path) -> Path:
    """Where a split keeps the checksum of each sample: uint32[samples], CRC-32 of the bytes of its tokens."""
    return prefix.with_name(prefix.name + ".crc32.npy")


def spans_path(prefix: Path) -> Path:
    """Where a split keeps parts of inputs that are to be learned, too: int64[m, 3], (sample, first, end)."""
    return prefix.with_name(prefix.name + ".spans.npy")


def manifest_path(folder: Path) -> Path:
    """Where a dataset folder describes itself."""
    return folder / "manifest.json"


def meta_path(folder: Path) -> Path:
    """The manifest that a dataset folder has; `manifest.json` where it has none."""
    old = folder / "meta.json"
    return old if old.exists() and not manifest_path(folder).exists() else manifest_path(folder)


def files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split that are there."""
    prefix = folder / split
    named = (
        data_path(prefix),
        index_path(prefix),
        task_ids_path(folder, split),
        checksums_path(prefix),
        spans_path(prefix),
    )
    return [path for path in named if path.exists()]


def quick_digest(path: Path) -> str:
    """32 hexadecimal digits of a file's size and contents, or of blocks of it where it is large.

    Raises:
        DataError: the file cannot be read.
    """
    size = _size(path)
    if size <= WHOLE_BYTES:
        return whole_digest(path)
    last = size - BLOCK_BYTES
    places = [round(last * block / (BLOCKS - 1)) for block in range(BLOCKS)]
    return _digest(path, size, ((place, BLOCK_BYTES) for place in places))


def whole_digest(path: Path) -> str:
    """32 hexadecimal digits of a file's size and contents; raises as `quick_digest`."""
    size = _size(path)
    return _digest(path, size, ((place, _CHUNK_BYTES) for place in range(0, size, _CHUNK_BYTES)))


def file_digests(path: Path) -> FileDigests:
    """What a manifest says of a file; raises as `quick_digest`."""
    whole = whole_digest(path)
    size = _size(path)
    return FileDigests(size=size, quick=whole if size <= WHOLE_BYTES else quick_digest(path), whole=whole)


def check_files(folder: Path, splits: Iterable[str], manifest: Mapping[str, FileDigests]) -> dict[str, str]:
    """The quick digest of every file of some splits, by name, each equal to the manifest's where that has it.

    Raises:
        DataError: a file has changed since the dataset was made, or cannot be read.
    """
    digests = {path.name: quick_digest(path) for split in splits for path in files_of(folder, split)}
    for name, digest in digests.items():
        if name in manifest and digest != manifest[name].quick:
            raise changed_file(folder / name, manifest[name].quick, digest)
    return digests


def changed_file(path: Path, expected: str, found: str) -> DataError:
    """The error of a file that is not the manifest's."""
    return DataError(
        f"{path}: expected the file that {meta_path(path.parent).name} describes (digest {expected}), found another "
        f"(digest {found})",
        hint="it was overwritten or copied badly: copy it again, or make the dataset again with `data prepare`; "
        "`data verify` checks every file and sample",
    )


def folder_digest(folder: Path) -> str:
    """32 hexadecimal digits of the names and contents of a folder's own files, as a tokenizer's; raises as above."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            state.update(f"{path.name}\0{whole_digest(path)}\0".encode())
    return state.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _digest(path: Path, size: int, parts: Iterable[tuple[int, int]]) -> str:
    state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    try:
        descriptor = open_regular(path)
        try:
            for place, length in parts:
                state.update(os.pread(descriptor, length, place))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error
    return state.hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot read it: {error.strerror}")
