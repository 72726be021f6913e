"""Digests of a checkpoint's files, written next to them when it is saved and compared before it is loaded.

Archives that torch wrote hold checksums themselves, which torch does not look at. A file of a dataset has one digest
(`file_digest`):

    up to 2 GB   ████████████████████████    the whole file
    above        ██ · █ · █ · █ · █ · ██     its size, head, tail and blocks at fixed places: about a second
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.files import open_regular, read_bounded
from megatron_dynapipe.outputs import replace_bytes

NAME = "dynapipe-digests.json"
_BLOCK_BYTES = 2**24
_THREADS = 8
WHOLE_BYTES = 2_000_000_000
"""Files of a dataset of at most this size are read whole: two or three seconds."""
PART_BYTES = 1_000_000
PARTS = 512
_CHUNK_BYTES = 2**22


def write_digests(folder: Path) -> None:
    """Write the digest of every other file below a folder, by relative path; raises OSError."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    digests = _digests(folder, sorted(str(path.relative_to(folder)) for path in paths))
    replace_bytes(folder / NAME, msgspec.json.format(msgspec.json.encode(digests), indent=1) + b"\n")


def check_digests(folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
    """Compare a folder's files with their digests, if it has any; each of `ranks` ranks reads its share of the files.

    Raises:
        DataError: a file is another than was saved, or cannot be read.
    """
    if not (folder / NAME).exists():
        return
    try:
        saved = msgspec.json.decode(read_bounded(folder / NAME), type=dict[str, str])
        digests = _digests(folder, sorted(saved)[rank::ranks])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"cannot compare the checkpoint {folder} with its {NAME}: {error}") from error
    if changed := [name for name, digest in digests.items() if digest != saved[name]]:
        raise DataError(
            f"{folder}: expected the files that were saved, found others under {', '.join(changed[:4])}",
            hint=f"copy them again or load another checkpoint; without {NAME} files are not compared",
        )


def check_archives(folder: Path) -> None:
    """Compare the archives in a folder, `*.pt`, with their checksums; raises DataError."""
    for path in sorted(folder.glob("*.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            damaged = str(error)
        if damaged is not None:
            raise DataError(
                f"{path}: expected the file that was saved, found another: {damaged}",
                hint="delete it to go on from an earlier checkpoint",
            )


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return {name: _digest(folder / name, pool) for name in names}


def _digest(path: Path, pool: ThreadPoolExecutor) -> str:
    """32 hexadecimal digits: the digest of the digests of a file's blocks."""
    descriptor = open_regular(path)

    def block(place: int) -> bytes:
        return hashlib.blake2b(os.pread(descriptor, _BLOCK_BYTES, place), digest_size=16).digest()

    try:
        blocks = pool.map(block, range(0, os.fstat(descriptor).st_size, _BLOCK_BYTES))
        return hashlib.blake2b(b"".join(blocks), digest_size=16).hexdigest()
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """32 hexadecimal digits of a file's size and contents, or of blocks of it where it is large.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
            for place, length in _parts(size):
                state.update(os.pread(descriptor, length, place))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot read it: {error.strerror}") from error
    return state.hexdigest()


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """(place, bytes) of what is read of a file."""
    if size <= WHOLE_BYTES:
        return ((place, _CHUNK_BYTES) for place in range(0, size, _CHUNK_BYTES))
    last = size - PART_BYTES
    return ((round(last * part / (PARTS - 1)), PART_BYTES) for part in range(PARTS))
