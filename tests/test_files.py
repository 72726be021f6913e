"""Reading whole files: never more than was meant, never without an end."""

import gzip
import io
import os
import resource
import tracemalloc
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.files import LEAST_FILES, check_open_files, read_bounded, read_unpacked, read_up_to


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


def test_reading_a_small_file_asks_for_little_memory(tmp_path: Path) -> None:
    """Whatever the bound is: `file.read(N)` asks for N bytes."""
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    tracemalloc.start()
    assert len(read_unpacked(path)) == 1000
    assert read_up_to(io.BytesIO(bytes(5000)), 2_000_000_000) == bytes(5000)
    assert read_up_to(io.BytesIO(bytes(5000)), 4000) == bytes(4000)
    assert read_up_to(io.BytesIO(bytes(5000)), 4000, head=b"[1") == b"[1" + bytes(3998)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    file = io.BytesIO(bytes(50_000_000))
    tracemalloc.start()
    read_up_to(file, 100_000_000)
    assert tracemalloc.get_traced_memory()[1] < 75_000_000, "no copy of all of it"
    tracemalloc.stop()


def test_the_limit_of_open_files_is_raised_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (LEAST_FILES - 1, 100_000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert check_open_files() == 4096
    assert limits["now"] == (4096, 100_000)
    limits["now"] = (48, 48)
    with pytest.raises(ConfigError, match="expected a limit of at least 256 open files, got 48"):
        check_open_files()
