"""Gathers encoded rows in the folder in which a dataset is made.

The folder stands next to the dataset under a name of its own. A run that was killed leaves it, and the next clears it.
"""

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.prepare.encode import SAMPLE, Array, EncodedRows

TOKENS, TOKENIZER, FINISHED, OLD = "tokens", "tokenizer", "dataset", "old"
"""In it: the samples' tokens, the tokenizer, the dataset that is put together, and the one that was replaced."""
MOST_TASKS = 2**15


class Staging:
    """Gathers encoded rows: tokens in a file, all else in memory, some forty bytes a sample.

    Attributes:
        rows: rows so far, a sample each, or none.
        errors, remarks, not_written, empty: as in `EncodedRows`, of all rows.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens = (folder / TOKENS).open("wb")
        self._texts: dict[str, int] = {}
        self._tasks: set[int] = set()
        self._samples = [np.empty(0, SAMPLE)]
        self._spans = [np.empty((0, 3), np.int64)]
        self.rows = 0
        self.errors: list[tuple[int, str]] = []
        self.remarks: Counter[str] = Counter()
        self.not_written: Counter[str] = Counter()
        self.empty: Counter[tuple[int, str]] = Counter()

    def add(self, rows: EncodedRows) -> None:
        """Append the rows of a block."""
        self._tokens.write(rows.tokens)
        places = np.array([self._texts.setdefault(text, len(self._texts)) for text in rows.texts], np.uint32)
        for name in ("task", "lost"):
            rows.samples[name] = places[rows.samples[name]]
        self._tasks.update(np.unique(rows.samples["task"]).tolist())
        if len(self._tasks) > MOST_TASKS:
            raise DataError(f"expected at most {MOST_TASKS} tasks, got {len(self._tasks)}")
        self._samples.append(rows.samples)
        self._spans.append(rows.spans + np.array([self.rows, 0, 0]))
        self.rows += len(rows.samples)
        self.errors += rows.errors
        self.remarks += rows.remarks
        self.not_written.update(rows.not_written)
        self.empty += rows.empty

    def samples(self) -> Array:
        """All samples, of the form `SAMPLE`."""
        return np.concatenate(self._samples)

    def spans(self) -> Array:
        """All spans, as in `EncodedRows`."""
        return np.concatenate(self._spans)

    @property
    def texts(self) -> list[str]:
        """The texts whose places samples have."""
        return list(self._texts)

    def close(self) -> None:
        """Close the file; raises OSError where the disk is full."""
        self._tokens.close()


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """Make the folder next to a dataset in which it is made, and keep other processes out of it.

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
        if others := sorted({path.name for path in folder.iterdir()} - {TOKENS, TOKENIZER, FINISHED, OLD}):
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
