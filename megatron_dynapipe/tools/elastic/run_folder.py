"""The folder of a run: one run at a time saves to it, and deletes only what it recorded as its own.

.dynapipe-lock                    locked by rank 0 until its process ends
.dynapipe-run.json                the folders that the run made
iteration_0000004                 the last checkpoint
iteration_0000006.unfinished      is being saved
iteration_0000004.replaced        the old one, while the same iteration is saved again
iteration_0000002.removed         is being deleted
"""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.outputs import lock_folder, replace_bytes
from megatron_dynapipe.tools.folders import replace_folder, restore_folder, strangers

RECORD = ".dynapipe-run.json"
_PREFIX = "iteration_"
_MOST_BYTES = 10_000_000
_TORCH_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""Files of torch's checkpoints: rank 0 may not see other nodes' at once on a network file system."""


_Waste = Annotated[str, msgspec.Meta(pattern=rf"^{_PREFIX}\d+\.(unfinished|replaced|removed)(-\d+)?\Z")]


class _Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Folders that a run made.

    Attributes:
        format: name and version of this form.
        files: of each complete checkpoint, relative to its folder.
        waste: names of folders that are deleted whole, should they exist.
        aside: what a checkpoint is called while its iteration is saved again; None if none is.
    """

    format: Literal["dynapipe-elastic-run/1"] = "dynapipe-elastic-run/1"
    files: dict[Annotated[str, msgspec.Meta(pattern=rf"^{_PREFIX}\d+\Z")], list[str]] = {}
    waste: list[_Waste] = []
    aside: _Waste | None = None


class RunFolder:
    """Keeps the last checkpoint of a run; used by one rank.

    Whatever moment the process is killed at, the checkpoint before or the new one is there under its name, or gets it
    back from `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record = _Record()

    def open(self, *, wait_s: float) -> str:
        """Lock the folder and tidy up after a killed run; the name of the last checkpoint, empty without one."""
        lock_folder(self.path, wait_s=wait_s)
        record = self.path / RECORD
        try:
            self._record = msgspec.json.decode(read_bounded(record, most_bytes=_MOST_BYTES), type=_Record)
        except FileNotFoundError:
            pass
        except (msgspec.DecodeError, UnicodeDecodeError):
            print(f"cannot read {record}: nothing that is in {self.path} now is deleted", flush=True)
        self._sweep()
        return self._last()

    def begin(self, iteration: int) -> Path:
        """A folder to save an iteration to, which does not exist; then `complete` it. Raises OSError."""
        self._sweep()
        fresh = self._free_name(f"{name_of(iteration)}.unfinished")
        self._record.waste = [fresh]
        self._write()
        return self.path / fresh

    def complete(self, fresh: Path, iteration: int) -> None:
        """Give the folder that was saved to its name, and delete the checkpoints before. Raises OSError."""
        name, record = name_of(iteration), self._record
        files = sorted(str(path.relative_to(fresh)) for path in fresh.rglob("*") if not path.is_dir())
        removed = {old: self._free_name(f"{old}.removed") for old in record.files if old != name}
        removed = {old: to for old, to in removed.items() if self._is_own(old)}
        record.aside = self._free_name(f"{name}.replaced")
        record.waste += removed.values()
        if self._is_own(name):
            record.waste.append(record.aside)
        record.files[name] = sorted({*files, *record.files.get(name, ())})  # both, until it is known which is there
        self._write()
        replace_folder(fresh, self.path / name, aside=self.path / record.aside)
        for old, to in removed.items():
            (self.path / old).rename(self.path / to)
        record.files = {name: files}
        self._sweep()

    def _last(self) -> str:
        names = (path.name for path in self.path.glob(f"{_PREFIX}*") if path.is_dir())
        numbers = [int(name.removeprefix(_PREFIX)) for name in names if re.fullmatch(rf"{_PREFIX}\d{{7,}}", name)]
        return name_of(max(numbers)) if numbers else ""

    def _is_own(self, name: str) -> bool:
        """Whether a folder is one that this run made, with nothing in it that somebody else put there."""
        path, files = self.path / name, self._record.files.get(name)
        if files is None or path.is_symlink() or not path.is_dir():
            return False
        others = [stranger for stranger in strangers(path, files) if not _TORCH_FILE.fullmatch(stranger)]
        if others:
            print(f"{path} is kept: {others[0]} in it is not this run's", flush=True)
        return not others

    def _free_name(self, name: str) -> str:
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(free for free in names if not os.path.lexists(self.path / free))

    def _sweep(self) -> None:
        """Undo a replacement that was not completed, and delete what is waste."""
        if aside := self._record.aside:
            restore_folder(self.path / aside.partition(".")[0], aside=self.path / aside)
        for name in self._record.waste:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        if self._record.waste or self._record.aside:
            self._record.waste, self._record.aside = [], None
            self._write()

    def _write(self) -> None:
        replace_bytes(self.path / RECORD, msgspec.json.encode(self._record))


def name_of(iteration: int) -> str:
    """The name of an iteration's checkpoint."""
    return f"{_PREFIX}{iteration:07d}"


def iteration_of(name: str) -> int:
    """The iteration of a checkpoint's folder."""
    return int(name.removeprefix(_PREFIX))
