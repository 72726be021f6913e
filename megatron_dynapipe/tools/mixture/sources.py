"""The sources of a mixture's entries: files, a HuggingFace dataset, or rows in memory."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.digests import WHOLE_BYTES, file_digest
from megatron_dynapipe.tools.mixture.fields import columns_of
from megatron_dynapipe.tools.mixture.rows import Block, file_blocks, files_of_source, hub_blocks, rows_as_block
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One file or table of a source.

    Attributes:
        blocks: gives its rows in order, the same whenever called.
        fingerprint: gives a text that differs where the rows may differ.
        size: bytes, for progress; 0 where that is not known.
        path: the file's, if it is one.
    """

    blocks: Callable[[], Iterator[Block]]
    fingerprint: Callable[[], str]
    size: int = 0
    path: Path | None = None


Source = Sequence[SourcePart]
"""The rows of an entry, part after part."""


def rows_source(rows: Sequence[Any]) -> Source:
    """Rows in memory."""

    def blocks() -> Iterator[Block]:
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            yield rows_as_block(rows[first : first + _ROWS_AT_ONCE], "sample", first)

    return [SourcePart(blocks, lambda: msgspec.json.encode(rows).decode())]


def open_sources(mixture: Mixture, root: Path, *, hub_root: Path | None = None) -> list[Source]:
    """The source of each entry, in order.

    Args:
        mixture: its entries.
        root: what relative paths are relative to.
        hub_root: folder with copies of hub datasets, by their names, to read instead of downloading.

    Raises:
        DataError: files or datasets are not there.
    """
    return [_open(spec, root, hub_root) for spec in mixture.tasks]


def _open(spec: TaskSpec, root: Path, hub_root: Path | None) -> Source:
    read: dict[str, Any] = {"needed": columns_of(spec), "drops_nulls": spec.messages is not None}
    if spec.hub is not None:
        rows = load_hub(spec.hub, spec.hub_config, spec.split or "train", hub_root)
        return [_table(spec.hub, rows, read)]
    assert spec.source is not None
    parts: list[SourcePart] = []
    for entry in [spec.source] if isinstance(spec.source, str) else spec.source:
        place = root / entry
        if _is_saved(place):
            parts.append(_table(str(place), load_hub(str(place), None, spec.split or "train", None), read))
        else:
            parts += [_file(path, read) for path in files_of_source(entry, root, spec.split)]
    return parts


def _file(path: Path, read: Mapping[str, Any]) -> SourcePart:
    def fingerprint() -> str:
        """Name, size and contents; of a very large file blocks of it and its time of change."""
        digest = file_digest(path)
        stat = path.stat()
        return f"{path.name} {digest}" + (f"\0{stat.st_mtime_ns}" if stat.st_size > WHOLE_BYTES else "")

    return SourcePart(partial(file_blocks, path, **read), fingerprint, path.stat().st_size, path)


def _table(name: str, rows: Any, read: Mapping[str, Any]) -> SourcePart:
    def fingerprint() -> str:
        files = [file_digest(Path(cached["filename"])) for cached in rows.cache_files]
        return "\0".join([f"{name} {len(rows)} {','.join(rows.column_names)}", *(files or [str(rows._fingerprint)])])

    return SourcePart(partial(hub_blocks, name, rows, **read), fingerprint)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_hub(name: str, config: str | None, split: str, hub_root: Path | None) -> Any:
    """A `datasets.Dataset` from the hub, from a copy of it, or from a folder written by save_to_disk.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    place = name if hub_root is None else str(hub_root / name)
    try:
        if not _is_saved(Path(place)):
            if hub_root is None and not Path(place).exists():
                asks = f"asking the hub for {name}; without a network this takes minutes (--hub-root FOLDER: a copy)"
                print(asks, file=sys.stderr, flush=True)
            return datasets.load_dataset(place, config, split=split)
        loaded = datasets.load_from_disk(place)
        return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name}: expected a HuggingFace dataset with a split {split!r}: {error}",
            hint="without a network, copy it and pass --hub-root FOLDER, or name its files as source; one that needs a"
            " script of its own is not run: convert it to parquet",
        ) from error
