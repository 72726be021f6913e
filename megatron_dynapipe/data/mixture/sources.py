"""The source of each entry of a mixture: files, a HuggingFace dataset, or rows in memory."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megatron_dynapipe.data.identity import WHOLE_BYTES, quick_digest
from megatron_dynapipe.data.mixture.rows import Block, file_blocks, files_of_source, hub_blocks, rows_as_block
from megatron_dynapipe.data.mixture.spec import Mixture, TaskSpec
from megatron_dynapipe.errors import DataError

_ROWS_AT_ONCE = 1000


class Source(Protocol):
    """The rows of an entry."""

    @property
    def size(self) -> int:
        """Bytes of its files, for progress; 0 where that is not known."""

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """The rows in order, the same whenever asked for; with each block the bytes read so far."""

    def fingerprint(self) -> Iterable[str]:
        """Texts that differ where the rows may differ."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files one after another."""

    paths: Sequence[Path]
    size: int

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """See `Source`."""
        before = 0
        for path in self.paths:
            for block in file_blocks(path):
                yield block, before + block.done
            before += path.stat().st_size

    def fingerprint(self) -> Iterator[str]:
        """See `Source`: names, sizes and contents; of a very large file blocks of it and its time of change."""
        for path in self.paths:
            yield f"{path.name} {quick_digest(path)}"
            if (stat := path.stat()).st_size > WHOLE_BYTES:
                yield str(stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Hub:
    """A `datasets.Dataset`."""

    name: str
    rows: Any
    size: int = 0

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """See `Source`."""
        for block in hub_blocks(self.name, self.rows):
            yield block, 0

    def fingerprint(self) -> Iterator[str]:
        """See `Source`."""
        yield f"{self.name} {len(self.rows)} {','.join(self.rows.column_names)}"
        files = self.rows.cache_files
        yield from (quick_digest(Path(each["filename"])) for each in files)
        if not files:
            yield str(self.rows._fingerprint)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in memory."""

    rows: Sequence[Any]
    size: int = 0

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """See `Source`."""
        for first in range(0, len(self.rows), _ROWS_AT_ONCE):
            yield rows_as_block(self.rows[first : first + _ROWS_AT_ONCE], "sample", first), 0

    def fingerprint(self) -> Iterator[str]:
        """See `Source`."""
        state = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            state.update(msgspec.json.encode(row))
        yield state.hexdigest()


def open_sources(mixture: Mixture, root: Path, *, hub_root: Path | None = None) -> list[Source]:
    """The source of every entry.

    Args:
        mixture: its entries' paths are relative to …
        root: … this folder.
        hub_root: folder of copies of hub datasets, by their names, to read in place of the hub.

    Raises:
        DataError: a source is not there.
    """
    return [_open(spec, root, hub_root) for spec in mixture.tasks]


def _open(spec: TaskSpec, root: Path, hub_root: Path | None) -> Source:
    if spec.hub is not None:
        return Hub(spec.hub, load_hub(spec.hub, spec.hub_config, spec.hub_split, hub_root))
    assert spec.source is not None
    given = [spec.source] if isinstance(spec.source, str) else spec.source
    saved = [root / path for path in given if is_saved(root / path)]
    if saved and len(given) == 1:
        return Hub(str(saved[0]), load_hub(str(saved[0]), None, spec.hub_split, None))
    paths = files_of_source(given, root)
    return Files(paths, sum(path.stat().st_size for path in paths))


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `datasets`' save_to_disk."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_hub(name: str, config: str | None, split: str, hub_root: Path | None) -> Any:
    """A `datasets.Dataset` from the hub, from a copy of it, or from a folder written by save_to_disk.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    place = name if hub_root is None else str(hub_root / name)
    try:
        if not is_saved(Path(place)):
            return datasets.load_dataset(place, config, split=split)
        loaded = datasets.load_from_disk(place)
        return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name}: expected a HuggingFace dataset with a split {split!r}: {error}",
            hint="without a network, copy it and pass --hub-root FOLDER, or name its files as source",
        ) from error
