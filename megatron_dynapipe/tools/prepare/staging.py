"""Encoded samples on the way to a dataset: a file for each column, which grows as blocks of samples are appended.

The folder stands next to the dataset under a name of its own. A run that was killed leaves it, and the next clears it.
"""

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.prepare.encode import MOST_ERRORS, MOST_LOST, EncodedBlock
from megatron_dynapipe.tools.prepare.settings import Skipped

COLUMNS: dict[str, str] = {
    "tokens": "u1",  # bytes: the tokens' type follows from the vocabulary
    "lengths": "<i4",
    "ends": "u1",
    "checksums": "<u4",
    "digests": "<u8",
    "statuses": "u1",
    "tasks": "<u2",
    "spans": "<i8",
    "lost": "<u8",
}
"""Files of a staging folder, and their types."""
TOKENIZER, FINISHED, OLD = "tokenizer", "dataset", "old"
"""Also in it: the tokenizer, the dataset that is put together, and the one that was replaced."""
_NAMES = {*COLUMNS, TOKENIZER, FINISHED, OLD, "checkpoint"}  # the last of earlier versions
MOST_TASKS = 2**15


class Staging:
    """The files of a staging folder.

    Attributes:
        folder: where they are.
        entries: samples of each entry of the mixture so far.
        remarks: what the user should know of some samples, counted.
        not_written: what rows have and their template does not write, counted.
        empty: rows in which a column is empty that a template names, by entry and column.
        bad: rows that gave no sample, by reason and task.
        errors: of rows that were left out, the first of each reason, in words.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._task_ids: dict[str, int] = {}
        self.entries: list[int] = []
        self.remarks: Counter[str] = Counter()
        self.not_written: Counter[str] = Counter()
        self.empty: Counter[tuple[int, str]] = Counter()
        self.bad: Counter[tuple[Skipped, str]] = Counter()
        self.errors: dict[Skipped, list[str]] = {}
        self._files = {name: (folder / name).open("wb") for name in COLUMNS}

    @property
    def names(self) -> list[str]:
        """Names of the tasks, in the order in which they came."""
        return list(self._task_ids)

    @property
    def samples(self) -> int:
        """Samples so far, those that are left out among them."""
        return sum(self.entries)

    def add(self, entry: int, block: EncodedBlock) -> None:
        """Append a block's samples."""
        ids = np.array([self._task_id(name) for name in block.names], np.uint16)
        columns = block.columns
        self.not_written.update(block.not_written)
        spans = columns["spans"] + [self.samples, 0, 0]
        lost = _with_bits(columns["lost"], list(block.not_written), list(self.not_written))
        columns = columns | {"tasks": ids[columns["tasks"]], "spans": spans, "lost": lost}
        for name, file in self._files.items():
            file.write(columns[name].tobytes())
        self.entries += [0] * (entry + 1 - len(self.entries))
        self.entries[entry] += len(columns["tasks"])
        self.remarks += block.remarks
        self.empty.update({(entry, column): count for column, count in block.empty.items()})
        self.bad += block.bad
        for reason, errors in block.errors.items():
            self.errors[reason] = [*self.errors.get(reason, []), *errors][:MOST_ERRORS]

    def column(self, name: str) -> npt.NDArray[Any]:
        """A file's content, memory-mapped; after `close`."""
        path = self.folder / name
        dtype = np.dtype(COLUMNS[name])
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    def close(self) -> None:
        """Close the files; raises OSError where the disk is full."""
        for file in self._files.values():
            file.close()

    def _task_id(self, name: str) -> int:
        if name not in self._task_ids and len(self._task_ids) == MOST_TASKS:
            raise DataError(f"expected at most {MOST_TASKS} tasks, got {MOST_TASKS + 1}")
        return self._task_ids.setdefault(name, len(self._task_ids))


def _with_bits(lost: npt.NDArray[np.uint64], names: list[str], all_names: list[str]) -> npt.NDArray[np.uint64]:
    """The bits of names in one list, moved to the same names' bits in another."""
    bits = np.zeros_like(lost)
    for at, name in enumerate(names[:MOST_LOST]):
        if (place := all_names.index(name)) < MOST_LOST:
            bits |= (lost >> np.uint64(at) & np.uint64(1)) << np.uint64(place)
    return bits


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """The folder next to a dataset in which it is made; no other process has it at the same time.

    Raises:
        DataError: another process is making the same dataset, or a folder of this name holds something else.
        OSError: it cannot be made.
    """
    folder = output.parent / f".{output.name}.prepare"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DataError(
            f"expected nobody else to make {output}, another process does", hint="wait for it, or end it"
        ) from error
    try:
        others = sorted(
            {path.name for path in folder.iterdir() if path.name.strip(".").partition(".")[0] not in _NAMES}
        )
        if others:
            raise DataError(
                f"expected {folder} to hold an unfinished dataset, found {', '.join(others[:5])}",
                hint="move that away: datasets are made there",
            )
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if nothing is left in it
        os.close(lock)


def clear(folder: Path) -> None:
    """Delete what is in a staging folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
