"""Reading whole files: never more than was meant, never without an end."""

import gzip
import os
from pathlib import Path

import pytest

from megatron_dynapipe.files import read_bounded, read_unpacked


def test_a_compressed_file_is_unpacked_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert read_unpacked(path, most_bytes=1000) == bytes(1000)
    with pytest.raises(OSError, match="expected at most 999 bytes when unpacked, found more"):
        read_unpacked(path, most_bytes=999)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(OSError, match="expected a whole gzip file"):
        read_unpacked(path)


def test_a_file_is_read_whole_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"x", bytes(range(256)) * 1000):
        path.write_bytes(content)
        assert read_bounded(path, most_bytes=256_000) == content
    assert read_bounded(Path("/proc/self/cmdline"))  # which does not say its size


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "expected at most 10 bytes, found 11"),
        ("/proc/self/cmdline", "expected at most 10 bytes"),
        ("fifo", "expected a regular file, found a pipe"),
        ("/dev/zero", "expected a regular file, found a device"),
        ("", "expected a regular file, found a folder"),
        ("none", "No such file"),
        ("a\0b", "null"),
    ],
)
def test_what_is_not_read(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match=message):
        read_bounded(tmp_path / path, most_bytes=10)
