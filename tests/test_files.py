"""Reading whole files: never more than was meant, never without an end."""

import gzip
import os
from pathlib import Path

import pytest

from megatron_dynapipe.files import read_bounded, read_unpacked


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"x", bytes(range(256)) * 1000):
        path.write_bytes(content)
        assert read_bounded(path, most_bytes=256_000) == content


def test_a_larger_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(11))
    with pytest.raises(OSError, match="expected at most 10 bytes, found 11"):
        read_bounded(path, most_bytes=10)


def test_a_pipe_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "pipe"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        with pytest.raises(OSError, match=f"expected a regular file, found a {kind}"):
            read_bounded(path)


def test_a_file_that_does_not_say_its_size_is_bounded_too() -> None:
    assert read_bounded(Path("/proc/self/cmdline"))
    with pytest.raises(OSError, match="expected at most 3 bytes"):
        read_bounded(Path("/proc/self/cmdline"), most_bytes=3)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none")
    with pytest.raises(OSError, match="null"):
        read_bounded(Path("a\0b"))


def test_a_compressed_file_is_unpacked_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert read_unpacked(path, most_bytes=1000) == bytes(1000)
    with pytest.raises(OSError, match="expected at most 999 bytes when unpacked, found more"):
        read_unpacked(path, most_bytes=999)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(OSError, match="expected a whole gzip file"):
        read_unpacked(path)
