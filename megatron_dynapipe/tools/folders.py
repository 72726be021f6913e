"""Folders of this program's files, replaced as a whole; files of the user's in them are named, and never deleted."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from megatron_dynapipe.outputs import sync


def replace_folder(new: Path, path: Path, *, aside: Path) -> None:
    """Give a finished folder its name; what had the name is renamed to `aside`, for the caller to delete.

    Killed between the two renames, `aside` is what was there: `restore_folder` gives it back its name. All three are on
    one file system. Raises OSError.
    """
    if path.exists():
        path.rename(aside)
    new.rename(path)
    sync(path.parent)


def restore_folder(path: Path, *, aside: Path) -> None:
    """Undo a `replace_folder` that was killed half-way. Raises OSError."""
    if aside.exists() and not path.exists():
        aside.rename(path)


def strangers(folder: Path, names: Collection[str]) -> list[str]:
    """Files and links below a folder that are not among `names` (paths relative to it), sorted; no empty folders."""
    paths = (
        str(path.relative_to(folder))
        for base, folders, files in os.walk(folder)
        for path in map(Path(base).joinpath, (*folders, *files))
        if path.name in files or path.is_symlink()
    )
    return sorted(path for path in paths if path not in names)


def delete_folder(folder: Path, names: Collection[str]) -> None:
    """Delete a folder's files of these names (paths relative to it), and folders that are empty then; strangers stay.

    Raises:
        OSError: a file cannot be deleted.
    """
    if folder.is_symlink():
        return
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for base, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            Path(base).rmdir()
