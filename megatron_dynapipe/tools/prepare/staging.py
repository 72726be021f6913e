"""Encoded samples on the way to a dataset: files that only grow, and how far they are whole.

    tokens       ████████████████████▒▒▒     ▒ is written, but not in the checkpoint yet: dropped when
    lengths      ██████████▒▒                a run that was killed continues
    checkpoint   blocks done, bytes of each file, tasks, samples of each entry

The folder stands beside the dataset under a name of its own, so that the next run of the same command finds it.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.outputs import replace_bytes
from megatron_dynapipe.tools.prepare.encode import EncodedBlock

COLUMNS: dict[str, str] = {
    "tokens": "u1",  # bytes: the tokens' type follows from the vocabulary
    "lengths": "<i4",
    "checksums": "<u4",
    "digests": "<u8",
    "statuses": "u1",
    "tasks": "<u2",
    "spans": "<i8",
}
"""Files of a staging folder, and their types."""
CHECKPOINT, TOKENIZER, FINISHED, OLD = "checkpoint.json", "tokenizer", "dataset", "old"
"""Also in it: how far it is, the tokenizer, the dataset that is put together, and the one that was replaced."""
_OWN = {*COLUMNS, CHECKPOINT.partition(".")[0], TOKENIZER, FINISHED, OLD}
CHECKPOINT_S = 1.0
MOST_TASKS = 2**15


class Checkpoint(msgspec.Struct, kw_only=True):
    """How far the staging files are whole.

    Attributes:
        recipe: digest of what they are made from.
        blocks: encoded so far, in order.
        sizes: bytes of each file.
        names: of the tasks, in the order in which they came.
        entries: samples of each entry of the mixture so far.
    """

    recipe: str
    blocks: int = 0
    sizes: dict[str, int] = {}
    names: list[str] = []
    entries: list[int] = []


class Staging:
    """The files of a staging folder.

    Attributes:
        folder: where they are.
        checkpoint: the state as of now; on the disk it is the latest that was saved.
        continued: blocks that an earlier run had done.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self.folder = folder
        self.checkpoint = checkpoint
        self.continued = checkpoint.blocks
        self._task_ids = {name: at for at, name in enumerate(checkpoint.names)}
        self._saved = time.monotonic()
        self._files = {name: (folder / name).open("ab") for name in COLUMNS}
        for name, file in self._files.items():
            file.seek(file.truncate(checkpoint.sizes.get(name, 0)))

    @property
    def samples(self) -> int:
        """Samples so far, those that are left out among them."""
        return sum(self.checkpoint.entries)

    def add(self, entry: int, block: EncodedBlock) -> None:
        """Append a block's samples; saves a checkpoint now and then."""
        state, columns = self.checkpoint, dict(block.columns)
        names = [self._task_id(name) for name in block.names]
        columns["tasks"] = np.array(names, np.uint16)[columns["tasks"]]
        columns["spans"] = columns["spans"] + [self.samples, 0, 0]
        for name, file in self._files.items():
            file.write(columns[name].tobytes())
        state.entries += [0] * (entry + 1 - len(state.entries))
        state.entries[entry] += block.samples
        state.blocks += 1
        if time.monotonic() > self._saved + CHECKPOINT_S:
            self.save()

    def save(self) -> None:
        """Have everything so far on the disk, then say so."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.checkpoint.sizes = {name: file.tell() for name, file in self._files.items()}
        replace_bytes(self.folder / CHECKPOINT, msgspec.json.encode(self.checkpoint))
        self._saved = time.monotonic()

    def column(self, name: str) -> npt.NDArray[Any]:
        """A file's content, memory-mapped; after `save`."""
        path = self.folder / name
        dtype = np.dtype(COLUMNS[name])
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk: the checkpoint says what is whole
                file.close()

    def _task_id(self, name: str) -> int:
        if name not in self._task_ids:
            if len(self._task_ids) == MOST_TASKS:
                raise DataError(f"expected at most {MOST_TASKS} tasks, got {MOST_TASKS + 1}")
            self._task_ids[name] = len(self._task_ids)
            self.checkpoint.names.append(name)
        return self._task_ids[name]


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """The folder beside a dataset in which it is made; no other process has it at the same time.

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
        others = sorted({path.name for path in folder.iterdir() if path.name.strip(".").partition(".")[0] not in _OWN})
        if others:
            raise DataError(
                f"expected {folder} to hold an unfinished dataset, found {', '.join(others[:5])}",
                hint="move that away: datasets are made there",
            )
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if nothing is left to continue
        os.close(lock)


def read_checkpoint(folder: Path, recipe: str) -> Checkpoint | None:
    """What an earlier run of the same recipe has left; None where there is none."""
    try:
        checkpoint = msgspec.json.decode((folder / CHECKPOINT).read_bytes(), type=Checkpoint)
        whole = all((folder / name).stat().st_size >= checkpoint.sizes[name] for name in COLUMNS)
    except (OSError, KeyError, msgspec.MsgspecError):
        return None
    return checkpoint if checkpoint.recipe == recipe and whole else None


def clear(folder: Path) -> None:
    """Delete what is in a staging folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
