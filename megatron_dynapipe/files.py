"""Reading files that people name: regular ones, of a size that their kind can have, some of them compressed.

A pipe, or a device such as `/dev/zero`, would be read without an end.
"""

import errno
import gzip
import io
import os
import resource
import stat
import zlib
from pathlib import Path
from typing import BinaryIO

from megatron_dynapipe.core.errors import ConfigError

MOST_BYTES = 1_000_000_000
"""No description, plan or cost model comes near this."""

LEAST_FILES = 256
_ENOUGH_FILES = 4096
_MOST_OF_KERNEL = 2**24
_CHUNK_BYTES = 2**20
_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISSOCK, "socket"),
)


def read_bounded(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `most_bytes`; `strerror` says which.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        # A file of the kernel's has content and says that its size is 0.
        data = file.read((size or min(most_bytes, _MOST_OF_KERNEL)) + 1) if size <= most_bytes else b""
    length = max(size, len(data))
    if length > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, found {length}", str(path))
    return data


def read_unpacked(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The contents of a file, unpacked if its name ends in .gz.

    Raises:
        OSError: as `read_bounded`, of the file and of its contents; or it is not a whole gzip file.
    """
    data = read_bounded(path, most_bytes=most_bytes)
    if path.suffix != ".gz":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            unpacked = read_up_to(file, most_bytes + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"expected a whole gzip file: {error}", str(path)) from error
    if len(unpacked) > most_bytes:
        raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes when unpacked, found more", str(path))
    return unpacked


def read_up_to(file: BinaryIO | gzip.GzipFile, most_bytes: int, *, head: bytes = b"") -> bytes:
    """`head` and the next bytes of a file, in memory that grows with them: one read of so many asks for all at once."""
    data = io.BytesIO()
    data.write(head)
    while data.tell() < most_bytes and (chunk := file.read(min(_CHUNK_BYTES, most_bytes - data.tell()))):
        data.write(chunk)
    return data.getvalue()  # as it lies there: a copy would take as much again


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file; the caller closes it. Raises OSError as `read_bounded`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else opening a pipe waits for a writer
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "special file")
        raise OSError(errno.EINVAL, f"expected a regular file, found a {kind}", str(path))
    return descriptor


def check_open_files() -> int:
    """Raise this process's limit of open files to what the machine allows it; the limit.

    Each rank has a connection to every other in each of its groups. gloo ends the process where none is left to open.

    Raises:
        ConfigError: it is below `LEAST_FILES`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _ENOUGH_FILES and soft < hard:
        soft = min(hard, _ENOUGH_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < LEAST_FILES:
        raise ConfigError(
            f"expected a limit of at least {LEAST_FILES} open files, got {soft}",
            hint=f"ulimit -n {_ENOUGH_FILES}, or the container's or the batch system's limit",
        )
    return soft


def user_cache_folder() -> Path:
    """The folder of measured costs and chosen layouts: `megatron-dynapipe` in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron-dynapipe"
