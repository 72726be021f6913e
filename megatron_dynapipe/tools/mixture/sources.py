"""The sources of a mixture's entries: files, a HuggingFace dataset, or rows in memory."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.digests import WHOLE_BYTES, file_digest
from megatron_dynapipe.tools.mixture.blocks import SUFFIXES, Block, ending_of, file_blocks, hub_blocks, rows_as_block
from megatron_dynapipe.tools.mixture.row_reader import columns_of
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec

_ROWS_AT_ONCE = 1000
_SIDE_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` writes next to rows."""
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
"""Splits, and how names of files and folders say them."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One file or table of a source.

    Attributes:
        blocks: gives its rows in order, the same whenever called.
        fingerprint: gives a text that differs where the rows may differ.
        size: bytes, for progress; 0 if that is not known.
    """

    blocks: Callable[[], Iterator[Block]]
    fingerprint: Callable[[], str]
    size: int = 0


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
        """Digest a file's name and contents; of a very large file blocks and its time of change."""
        digest = file_digest(path)
        stat = path.stat()
        return f"{path.name} {digest}" + (f"\0{stat.st_mtime_ns}" if stat.st_size > WHOLE_BYTES else "")

    return SourcePart(partial(file_blocks, path, **read), fingerprint, path.stat().st_size)


def _table(name: str, rows: Any, read: Mapping[str, Any]) -> SourcePart:
    def fingerprint() -> str:
        files = [file_digest(Path(cached["filename"])) for cached in rows.cache_files]
        return "\0".join([f"{name} {len(rows)} {','.join(rows.column_names)}", *(files or [str(rows._fingerprint)])])

    return SourcePart(partial(hub_blocks, name, rows, **read), fingerprint)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_hub(name: str, config: str | None, split: str, hub_root: Path | None) -> Any:
    """Load a `datasets.Dataset` from the hub, from a copy of it, or from a folder that save_to_disk wrote.

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


def files_of_source(source: str | Sequence[str], root: Path, split: str | None = None) -> list[Path]:
    """Find the files that paths, patterns and folders name; the matches of each are sorted by name.

    Args:
        source: paths, patterns or folders.
        root: what relative ones are relative to.
        split: of the files of a folder or pattern, those whose names say this split; None if they say but one.

    Raises:
        DataError: nothing is there, a file is of no known form, or names say several splits.
    """
    files: list[Path] = []
    for entry in [source] if isinstance(source, str) else source:
        path = root / entry
        if path.is_dir():
            inside = (match for match in path.rglob("*") if match.is_file() and ending_of(match) in SUFFIXES)
            matches = _of_split(path, sorted(file for file in inside if _has_rows(file.relative_to(path))), split)
        elif path.exists():
            matches = [path]
        else:
            found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            matches = _of_split(path, sorted(file for file in found if file.is_file()), split)
        if not matches:
            raise DataError(
                f"{path}: expected a file, a folder of files or a pattern{f' of {split}' if split else ''}, found none",
                hint=f"known are {', '.join(SUFFIXES)}",
            )
        files += matches
    return files


def _has_rows(path: Path) -> bool:
    return path.name not in _SIDE_FILES and not any(part.startswith(".") for part in path.parts)


def _of_split(source: Path, files: Sequence[Path], split: str | None) -> list[Path]:
    """Choose the files of a split; raises DataError if no split is asked for and the files belong to several."""
    base = Path(*source.parts[: next((at for at, part in enumerate(source.parts) if set(part) & set("*?[")), None)])
    of = {file: _split_of(file.relative_to(base)) for file in files}
    if split is not None:
        return [file for file in files if of[file] in (split, _split_of(Path(split)))]
    if len(said := {name: file for file, name in of.items() if name}) > 1:
        examples = ", ".join(f"{name} ({said[name].name})" for name in SPLITS if name in said)
        raise DataError(
            f"{source}: expected files of one split, their names say several: {examples}",
            hint="write `split: train` into the mixture, or patterns that match the files of one split",
        )
    return list(files)


def _split_of(path: Path) -> str | None:
    """Read the split from a path; its last word for one counts."""
    said = (
        (found.start(), split)
        for split, words in SPLITS.items()
        for found in re.finditer(rf"(?<![^\W_\d])(?:{words})(?![^\W_\d])", str(path), re.IGNORECASE)
    )
    return max(said, default=(0, None))[1]
