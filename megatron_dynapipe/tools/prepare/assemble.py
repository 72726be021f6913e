"""Staged samples → a dataset: who is left out, which split is whose, files in Megatron's format, and the manifest.

Reads the staging files in pieces, so that memory depends on the number of samples alone, a few bytes each.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import FileDigests, checksums_path, files_of, lost_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta
from megatron_dynapipe.data.writing import save_array, sync, token_dtype, write_index
from megatron_dynapipe.sampling import TruncationSide, spans_path
from megatron_dynapipe.sampling.lengths import data_path, ends_path, task_ids_path
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec, task_rates
from megatron_dynapipe.tools.prepare.encode import TRUNCATED, status_of
from megatron_dynapipe.tools.prepare.settings import PrepareSettings, Skipped
from megatron_dynapipe.tools.prepare.staging import Staging
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer, pad_id, start_id

_SAMPLES_AT_ONCE = 2**14
LEFT_OUT = len(SPLITS)

Array = npt.NDArray[Any]


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
    ranges = []
    for split, fraction in (("test", test_fraction), ("valid", valid_fraction)):
        number = min(max(round(fraction * count), fraction > 0), count - 1 - taken)
        ranges.append((split, taken, taken + number))
        taken += number
    if taken > 0:
        smallest = np.argpartition(digests, taken)[:taken] if taken < count else np.arange(count)
        # Ties go to the sample that came first.
        bound = digests[smallest].max()
        below = np.flatnonzero(digests < bound)
        equal = np.flatnonzero(digests == bound)
        order = np.concatenate([below[np.argsort(digests[below], kind="stable")], equal])[:taken]
        for split, start, end in ranges:
            splits[order[start:end]] = SPLITS.index(split)
    return splits


def decide(staging: Staging, tasks: Sequence[TaskSpec], settings: PrepareSettings) -> tuple[Array, Array]:
    """Each staged sample's split, or `LEFT_OUT`, and its status, now also of duplicates and of samples over a limit.

    Returns:
        uint8[samples] each.

    Raises:
        DataError: no sample is left for training.
    """
    digests = staging.column("digests")
    statuses = np.array(staging.column("statuses"))
    splits = np.full(staging.samples, LEFT_OUT, np.uint8)

    def leave_out(rows: Array, reason: Skipped) -> None:
        statuses[rows[statuses[rows] <= TRUNCATED]] = status_of(reason)

    first = 0
    for spec, count in zip(tasks, staging.entries, strict=False):
        # Samples that are left out for their text count, so that the others' splits do not depend on maximum lengths.
        rows = np.arange(first, first + count)
        first += count
        if spec.deduplicate:
            _, firsts = np.unique(digests[rows], return_index=True)
            again = np.ones(count, np.bool_)
            again[firsts] = False
            leave_out(rows[again], Skipped.DUPLICATE)
            rows = rows[~again]
        if spec.limit is not None and len(rows) > spec.limit:
            # By other bits than those that choose the splits.
            order = np.argsort(digests[rows] << np.uint64(32) | digests[rows] >> np.uint64(32), kind="stable")
            leave_out(rows[order[spec.limit :]], Skipped.OVER_LIMIT)
            rows = rows[np.sort(order[: spec.limit])]
        if len(rows):
            valid = settings.valid_fraction if spec.valid is None else spec.valid
            test = settings.test_fraction if spec.test is None else spec.test
            splits[rows] = assign_splits(digests[rows], valid, test)
    splits[statuses > TRUNCATED] = LEFT_OUT
    if not (splits == 0).any():
        others = ": all others are too long or empty" if len(splits) else ""
        raise DataError(f"expected at least 1 sample for training, got 0{others}")
    return splits, statuses


def write_dataset(
    staging: Staging,
    folder: Path,
    *,
    mixture: Mixture,
    settings: PrepareSettings,
    tokenizer: Tokenizer,
    fingerprint: str,
    recipe: str,
) -> DatasetMeta:
    """Write the files of all splits into a folder; its manifest.

    Raises:
        DataError: no sample is left for training, or a task is in two entries of the mixture.
    """
    names = sorted(staging.names)
    tasks = np.array([names.index(name) for name in staging.names], np.int16)[staging.column("tasks")]
    entries = _tasks_of_entries(staging, tasks, names)
    splits, statuses = decide(staging, mixture.tasks, settings)

    def by_task(chosen: Array | slice) -> dict[str, int]:
        """Samples of each task among those that are chosen."""
        counts = np.bincount(tasks[chosen], minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True) if count}

    longest = np.zeros(2, np.int32)
    for place in range(len(SPLITS)):
        longest = np.maximum(longest, _write_split(staging, folder, place, splits, tasks, len(tokenizer)))
    files = {path.name: FileDigests.of(path) for split in SPLITS for path in files_of(folder, split)}
    samples = {split: by_task(splits == place) for place, split in enumerate(SPLITS)}
    sides = {name: spec.side for spec, of in zip(mixture.tasks, entries, strict=False) for name in of}
    skipped = Counter({reason: int((statuses == status_of(reason)).sum()) for reason in Skipped})
    read = Counter(by_task(slice(None)))
    for (reason, task), count in staging.bad.items():
        skipped[reason] += count
        read[task] += count
    return DatasetMeta(
        source=settings.source,
        tasks=tuple(names),
        samples=samples,
        read=dict(read),
        skipped={str(reason): count for reason, count in skipped.items() if count},
        truncated=by_task(statuses == TRUNCATED),
        not_written=staging.not_written | _mostly_empty(staging, mixture),
        rates={} if mixture.is_even else task_rates(mixture, entries, samples["train"]),
        sides={name: side for name, side in sides.items() if side is not TruncationSide.RIGHT},
        loss="everything" if all(spec.text for spec in mixture.tasks) else "targets",
        lengths=_histogram(staging, splits == 0),
        vocabulary_size=len(tokenizer),
        pad_id=pad_id(tokenizer),
        bos_id=start_id(tokenizer),
        eos_id=tokenizer.eos_token_id,
        max_input_length=settings.max_input_length or max(int(longest[0]), 1),
        max_target_length=settings.max_target_length or max(int(longest[1]), 1),
        tokenizer=fingerprint,
        content_hash=_content_hash(fingerprint, files),
        recipe=recipe,
        files=files,
    )


def _content_hash(fingerprint: str, files: Mapping[str, FileDigests]) -> str:
    """A digest of the tokenizer's and of all files'."""
    state = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    for name in sorted(files):
        state.update(f"\0{name}\0{files[name].quick}".encode())
    return state.hexdigest()


def _tasks_of_entries(staging: Staging, tasks: Array, names: Sequence[str]) -> list[list[str]]:
    seen: set[str] = set()
    names_of_entries = []
    for tasks_of_entry in np.split(tasks, np.cumsum(staging.entries)[:-1]):
        names_of_entries.append([names[at] for at in np.unique(tasks_of_entry)])
        if twice := seen & set(names_of_entries[-1]):
            raise DataError(
                f"expected every task in one entry of the mixture, {min(twice)} is in two",
                hint="give one of them another name",
            )
        seen |= set(names_of_entries[-1])
    return names_of_entries


def _histogram(staging: Staging, chosen: npt.NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    lengths = staging.column("lengths").reshape(-1, 2)
    histogram: dict[str, dict[str, int]] = {}
    for part, name in enumerate(("input", "target")):
        at_least_one = np.maximum(lengths[chosen, part], 1)
        bins = np.ceil(np.log2(at_least_one)).astype(np.int64)
        counts = np.bincount(bins)
        histogram[name] = {str(2**power): int(count) for power, count in enumerate(counts) if count}
    return histogram


def _write_split(staging: Staging, folder: Path, at: int, splits: Array, tasks: Array, vocabulary: int) -> Array:
    """Write the files of the split of this place in `SPLITS`; its longest input and target."""
    prefix = folder / SPLITS[at]
    dtype = token_dtype(vocabulary)
    chosen = splits == at
    lengths = staging.column("lengths").reshape(-1, 2)
    ends = staging.column("ends").reshape(-1, 2)
    counted = lengths - ends * [0, 1]  # a target's end token does not count towards the longest
    longest = np.zeros(2, np.int32)
    with data_path(prefix).open("wb") as data, (staging.folder / "tokens").open("rb") as source:
        for part in _pieces(len(lengths)):
            # Read rather than mapped: mapped tokens stay resident.
            tokens = np.fromfile(source, dtype, int(lengths[part].sum(dtype=np.int64)))
            keep = chosen[part]
            data.write(tokens[np.repeat(keep, lengths[part].sum(1))].tobytes())
            longest = np.maximum(longest, np.max(counted[part][keep], axis=0, initial=0))
        sync(data)
    save_array(task_ids_path(folder, SPLITS[at]), tasks[chosen])
    save_array(checksums_path(prefix), staging.column("checksums")[chosen])
    if ends.any():
        save_array(ends_path(prefix), ends[chosen].reshape(-1))
    if (lost := staging.column("lost")).any():
        save_array(lost_path(prefix), lost[chosen])
    spans = staging.column("spans").reshape(-1, 3)
    if len(spans):
        spans = np.array(spans[chosen[spans[:, 0]]])
    if len(spans):
        new_numbers = np.cumsum(chosen) - 1
        spans[:, 0] = new_numbers[spans[:, 0]]
        save_array(spans_path(prefix), spans)
    pieces = list(_pieces(len(chosen)))
    count = int(chosen.sum())
    write_index(prefix, dtype, count, lambda: (lengths[part][chosen[part]].reshape(-1) for part in pieces))
    return longest


def _mostly_empty(staging: Staging, mixture: Mixture) -> Counter[str]:
    """The columns that a template names and that are empty in most rows of their entry."""
    mostly = Counter[str]()
    for (entry, column), count in staging.empty.items():
        if count > staging.entries[entry] / 2:
            spec = mixture.tasks[entry]
            mostly[f"rows of {spec.name or spec.task_column} in which {column!r} is empty"] = count
    return mostly


def _pieces(count: int) -> Iterator[slice]:
    return (slice(first, first + _SAMPLES_AT_ONCE) for first in range(0, count, _SAMPLES_AT_ONCE))
