"""Staged samples → the files of a dataset: who is left out, which split is whose, and everything in Megatron's format.

Reads the staging files in pieces, so that memory depends on the number of samples alone, a few bytes each.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.identity import checksums_path, spans_path
from megatron_dynapipe.data.indexed import token_dtype, write_index
from megatron_dynapipe.data.meta import SPLITS
from megatron_dynapipe.data.mixture.spec import TaskSpec
from megatron_dynapipe.data.prepare.encode import KEPT, STATUSES
from megatron_dynapipe.data.prepare.settings import PrepareSettings, Skipped
from megatron_dynapipe.data.prepare.staging import Staging
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.index_file import data_path
from megatron_dynapipe.sampling.lengths import task_ids_path

_SAMPLES_AT_ONCE = 2**14
LEFT_OUT = len(SPLITS)


def assign_splits(
    digests: npt.NDArray[np.uint64], valid_fraction: float, test_fraction: float
) -> npt.NDArray[np.uint8]:
    """The split of each sample: those with the smallest digests are for testing, then validation.

    Independent of the order of the samples. A fraction above 0 gives at least one sample, as long as one is left for
    training.

    Returns:
        uint8[n], places in `SPLITS`.
    """
    count = len(digests)
    splits = np.zeros(count, np.uint8)
    taken = 0
    wanted = []
    for split, fraction in (("test", test_fraction), ("valid", valid_fraction)):
        number = min(max(round(fraction * count), fraction > 0), count - 1 - taken)
        wanted.append((split, taken, taken + number))
        taken += number
    if taken > 0:
        smallest = np.argpartition(digests, taken)[:taken] if taken < count else np.arange(count)
        # Ties go to the sample that came first.
        bound = digests[smallest].max()
        below, equal = np.flatnonzero(digests < bound), np.flatnonzero(digests == bound)
        order = np.concatenate([below[np.argsort(digests[below], kind="stable")], equal])[:taken]
        for split, start, end in wanted:
            splits[order[start:end]] = SPLITS.index(split)
    return splits


def decide(staging: Staging, tasks: Sequence[TaskSpec], settings: PrepareSettings) -> npt.NDArray[np.uint8]:
    """Each staged sample's split, or `LEFT_OUT`; duplicates and samples over a limit get their status."""
    digests, statuses = staging.column("digests"), np.array(staging.column("statuses"))
    splits = np.full(staging.samples, LEFT_OUT, np.uint8)
    first = 0
    for spec, count in zip(tasks, staging.checkpoint.entries, strict=False):
        part = slice(first, first + count)
        first += count
        # Samples that are left out for their text count, so that the others' splits do not depend on maximum lengths.
        rows = np.arange(part.start, part.stop)
        if spec.deduplicate:
            _, firsts = np.unique(digests[part], return_index=True)
            again = np.ones(count, np.bool_)
            again[firsts] = False
            statuses[rows[again & (statuses[part] == KEPT)]] = 1 + STATUSES.index(Skipped.DUPLICATE)
            rows = rows[~again]
        if spec.limit is not None and len(rows) > spec.limit:
            # By other bits than those that choose the splits.
            order = np.argsort(digests[rows] << np.uint64(32) | digests[rows] >> np.uint64(32), kind="stable")
            over = rows[np.sort(order[spec.limit :])]
            statuses[over[statuses[over] == KEPT]] = 1 + STATUSES.index(Skipped.OVER_LIMIT)
            rows = rows[np.sort(order[: spec.limit])]
        if len(rows):
            valid = settings.valid_fraction if spec.valid is None else spec.valid
            test = settings.test_fraction if spec.test is None else spec.test
            splits[rows] = assign_splits(digests[rows], valid, test)
    splits[statuses != KEPT] = LEFT_OUT
    staging_statuses = staging.folder / "decided"
    statuses.tofile(staging_statuses)
    return splits


def skipped_counts(staging: Staging) -> dict[str, int]:
    """Samples left out, by reason; after `decide`."""
    statuses = np.fromfile(staging.folder / "decided", np.uint8)
    counts = np.bincount(statuses, minlength=1 + len(STATUSES))[1:]
    return {str(status): int(count) for status, count in zip(STATUSES, counts, strict=True) if count}


def task_counts(staging: Staging, ranks: npt.NDArray[np.int16], chosen: npt.NDArray[np.bool_]) -> Counter[int]:
    """Samples of each task among those that are chosen, by the task's place in the manifest."""
    counts: Counter[int] = Counter()
    tasks = staging.column("tasks")
    for first in range(0, len(tasks), _SAMPLES_AT_ONCE):
        part = slice(first, first + _SAMPLES_AT_ONCE)
        found = np.bincount(ranks[tasks[part][chosen[part]]], minlength=len(ranks))
        counts.update({at: int(count) for at, count in enumerate(found) if count})
    return counts


def write_split(
    staging: Staging,
    folder: Path,
    split: str,
    chosen: npt.NDArray[np.bool_],
    ranks: npt.NDArray[np.int16],
    vocabulary: int,
) -> tuple[int, int]:
    """Write the files of a split from the chosen samples; its longest input and target.

    Args:
        staging: with every sample.
        folder: of the dataset.
        split: its name.
        chosen: bool[samples].
        ranks: the place of each staged task in the manifest.
        vocabulary: entries, from which the tokens' type follows.
    """
    prefix, dtype = folder / split, token_dtype(vocabulary)
    lengths = staging.column("lengths").reshape(-1, 2)
    longest = np.zeros(2, np.int32)
    with data_path(prefix).open("wb") as data:
        for part, tokens in _pieces(staging, dtype):
            keep = chosen[part]
            mask = np.repeat(keep, lengths[part].sum(1))
            data.write(np.asarray(tokens[mask]).tobytes())
            longest = np.maximum(longest, np.max(lengths[part][keep], axis=0, initial=0))
        sync(data)
    _save(task_ids_path(folder, split), ranks[staging.column("tasks")[chosen]])
    _save(checksums_path(prefix), staging.column("checksums")[chosen])
    spans = staging.column("spans").reshape(-1, 3)
    if len(spans) and (kept := chosen[spans[:, 0]]).any():
        number = np.cumsum(chosen) - 1
        spans = np.array(spans[kept])
        spans[:, 0] = number[spans[:, 0]]
        _save(spans_path(prefix), spans)
    count = int(chosen.sum())
    chunks = [slice(first, first + _SAMPLES_AT_ONCE) for first in range(0, len(chosen), _SAMPLES_AT_ONCE)]
    write_index(prefix, dtype, count, lambda: (lengths[part][chosen[part]].reshape(-1) for part in chunks))
    return int(longest[0]), int(longest[1])


def _pieces(staging: Staging, dtype: np.dtype[Any]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Samples a number at a time, with their tokens, which are read rather than mapped: mapped ones stay resident."""
    lengths = staging.column("lengths").reshape(-1, 2)
    with (staging.folder / "tokens").open("rb") as file:
        for first in range(0, len(lengths), _SAMPLES_AT_ONCE):
            part = slice(first, first + _SAMPLES_AT_ONCE)
            yield part, np.fromfile(file, dtype, int(lengths[part].sum(dtype=np.int64)))


def check_training(splits: npt.NDArray[np.uint8]) -> None:
    """Raises DataError if no sample is left for training."""
    if not (splits == 0).any():
        raise DataError(
            "expected at least 1 sample for training, got 0"
            + (": all others are too long or empty" * bool(len(splits)))
        )


def sync(file: Any) -> None:
    """Have a file's bytes on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
        sync(file)
