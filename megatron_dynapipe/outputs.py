"""Writing what a command makes without losing what it did not make, and what a run says.

A file or folder appears whole under its name or not at all, and only what this package made is replaced: everything it
writes says `dynapipe` in its first bytes, or comes with a rule of its own that recognises it.

    notes.txt          a stranger: refused by name
    plan.json          {"format": "dynapipe-…": replaced
    link → elsewhere   the link stays, what it leads to is replaced
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_dynapipe.core.errors import CheckpointError, ConfigError
from megatron_dynapipe.files import open_regular

GENERATOR = "megatron-dynapipe"
"""The name that pictures, pages and traces give as the program that made them."""

_HEAD_BYTES = 4096
_FULL_MB = 1.0
_MOST_SHOWN = 200
LOCK = ".dynapipe-lock"
LOCK_SHARE = 0.8
"""A share of the deadline of exchanges: rank 0 waits so long for the folder's lock while others wait for rank 0."""
_POLL_S = 0.2
_locks: dict[Path, int] = {}
"""Descriptors of the lock files that this process holds."""


def is_first_rank() -> bool:
    """Whether this process speaks for its job: rank 0 does, and a process that is in none."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Add a line to a run's log, on the rank that speaks for all."""
    if is_first_rank():
        print(text, flush=True)


def warn(text: str) -> None:
    """Tell what goes wrong on this rank, on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def is_marked(head: bytes) -> bool:
    """Whether a file that begins so was written by this package."""
    return b"dynapipe" in head.lower()


def marked(mark: str) -> Callable[[bytes], bool]:
    """A rule for `is_ours`, where a user's file may say `dynapipe`, too: files with this text in their first bytes."""
    return lambda head: mark.encode() in head


def check_replaceable(path: Path, *, is_ours: Callable[[bytes], bool] = is_marked) -> None:
    """Before long work: that a file may be written under this name.

    Args:
        path: absent, or a file that may be replaced.
        is_ours: whether a file with these first bytes may be; an empty one always may.

    Raises:
        ConfigError: what is there is not a file that this package wrote, or nothing can be written there.
    """
    target = _resolved(path)
    if target.exists():
        try:
            with os.fdopen(open_regular(target), "rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", hint="name another file") from error
        if head and not is_ours(head):
            raise ConfigError(
                f"expected {path} to be absent or a file that this program wrote, it is another",
                hint="name another file, or move that one away",
            )
    _check_writable(path)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to one another
        raise ConfigError(f"cannot write {path}: {error}", hint="name another") from error


def _check_writable(path: Path) -> None:
    existing = _existing(path)
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"cannot write {path}: {existing} is read-only", hint="name another")
    if existing != path.resolve() and not existing.is_dir():
        raise ConfigError(f"cannot write {path}: {existing} is not a folder", hint="name another")


def _existing(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def write_file(
    path: Path, content: bytes | str, *, is_ours: Callable[[bytes], bool] = is_marked, mode: int | None = None
) -> None:
    """Put content under a name, whole or not at all, also when the machine stops; makes the folders above it.

    Args:
        path: where; a symbolic link stays one.
        content: the file's.
        is_ours: as `check_replaceable`.
        mode: permissions; None keeps the replaced file's, else as the process's umask.

    Raises:
        ConfigError: as `check_replaceable`, or the system refuses; the message names the path.
    """
    check_replaceable(path, is_ours=is_ours)
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(target, content.encode() if isinstance(content, str) else content, mode=mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def replace_bytes(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Put bytes under the name of a file of ours, whole or not at all; its folder exists. Raises OSError."""
    path = path.resolve()
    with fresh_file(path, mode=mode) as fresh:
        fresh.write_bytes(data)


@contextlib.contextmanager
def fresh_file(path: Path, *, mode: int | None = None) -> Iterator[Path]:
    """An empty file next to `path` to write to: it takes its name once the block has succeeded, and goes if not.

    Raises:
        OSError: as writing does.
    """
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".unfinished", dir=path.parent)
    os.close(descriptor)
    fresh = Path(name)
    try:
        yield fresh
        sync(fresh)
        fresh.chmod(_mode_for(path) if mode is None else mode)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def check_fresh(path: Path) -> None:
    """Before long work: that a folder is absent or empty, and can be written; raises ConfigError."""
    target = _resolved(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        content = "files in it" if target.is_dir() else "a file"
        raise ConfigError(f"expected {path} to be a new or an empty folder, found {content}", hint="name another")
    _check_writable(path)


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder next to `path` to fill: it takes its name once the block has succeeded, and goes if not.

    Raises:
        ConfigError: as `check_fresh`.
        CheckpointError: the block could not write; the message names the path.
    """
    check_fresh(path)
    target = path.resolve()
    fresh = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".unfinished", dir=target.parent))
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        fresh.rename(target)
        sync(target.parent)
    except BaseException as error:
        if not isinstance(error, OSError) and not hasattr(error, "failures"):  # torch's, which is no Exception
            raise
        raise unwritten(path, error) from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def unwritten(folder: Path, error: BaseException) -> CheckpointError:
    """The error of a checkpoint that could not be written to a folder: why, and how much room there is."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
    if failures or hasattr(error, "failures"):
        error = failures[0] if failures else OSError(0, "another rank could not write its share")
    reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())[:_MOST_SHOWN]
    existing = _existing(folder)
    free = shutil.disk_usage(existing).free / 1e6
    if free < _FULL_MB and not isinstance(error, OSError):  # torch's archives do not say why they could not be written
        reason = f"{os.strerror(errno.ENOSPC)} ({reason})"
    return CheckpointError(
        f"cannot write the checkpoint {folder}: {reason}",
        hint=f"{existing} has {free:.1f} MB free; checkpoints that were complete are as they were",
    )


def _mode_for(path: Path) -> int:
    if path.exists():
        return path.stat().st_mode & 0o7777
    return 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def sync(path: Path) -> None:
    """Have what a path names on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path, *, wait_s: float, of: str = "checkpoints") -> None:
    """Let no other run write what it is a folder `of` there until this process has ended.

    A file system without locks is named in the log. Locking a folder twice in one process does nothing, nor does the
    URL of an object store, through Megatron's multi-storage client.

    Raises:
        ConfigError: another run holds it after `wait_s`, or no file can be written there.
    """
    if ":/" in str(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        if path in _locks:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"cannot write {of} to {folder}: {error.strerror}", hint="give a folder that all nodes may write to"
        ) from error
    deadline = time.monotonic() + wait_s
    is_first = True
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"expected to be the only run that writes {of} to {folder}, {holder} holds {path.name}",
                    hint=f"end that run, or name another folder for the {of} of this one",
                ) from None
            if is_first:
                print(f"waiting for {holder}, which holds {path}, for {wait_s:.0f} s at most", flush=True)
        except OSError as error:
            print(f"{folder} cannot be locked ({error.strerror}): see that one run alone writes to it", flush=True)
            break
        is_first = False
        time.sleep(_POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _locks[path] = descriptor


def _close_locks() -> None:
    """In a forked process: what outlives a killed rank, such as a checkpoint's writer, must not keep its lock."""
    for descriptor in _locks.values():
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)
