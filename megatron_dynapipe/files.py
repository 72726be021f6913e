"""Reading files that may be compressed."""

import errno
import gzip
import zlib
from pathlib import Path


def read_unpacked(path: Path) -> bytes:
    """The contents of a file, unpacked if its name ends in .gz.

    Raises:
        OSError: it cannot be read, or is not a whole gzip file; `strerror` says which.
    """
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"expected a whole gzip file: {error}", str(path)) from error
