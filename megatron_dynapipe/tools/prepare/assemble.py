"""Staged samples → a dataset: decides which are left out and which split each is in, writes Megatron's files.

It reads the tokens in pieces, so that memory depends on the number of samples alone, a few bytes each.
"""

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import FileDigests, files_of, lost_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta
from megatron_dynapipe.data.writing import save_array, sync, token_dtype, write_split
from megatron_dynapipe.sampling import TruncationSide
from megatron_dynapipe.sampling.lengths import data_path, ends_path
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec, task_rates
from megatron_dynapipe.tools.prepare.encode import TRUNCATED, Array, status_of
from megatron_dynapipe.tools.prepare.settings import PrepareSettings, Skipped
from megatron_dynapipe.tools.prepare.staging import Staging
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer, pad_id, start_id

MOST_LOST = 64
"""Names of what is not written that samples are marked with."""
_SAMPLES_AT_ONCE = 2**14
LEFT_OUT = len(SPLITS)
_GAVE_NONE = [status_of(reason) for reason in (Skipped.UNREADABLE, Skipped.REFUSED_BY_TEMPLATE)]


class Samples:
    """Staged rows, by column.

    Attributes:
        rows: `encode.SAMPLE`s.
        spans: (row, first, end), as in `EncodedRows`.
        texts: the texts whose places rows have.
        given: bool[rows], whether a row gave a sample, be it one that is left out.
        entries: the rows of each of the mixture's entries; they stand one after another.
        lengths: int32[rows, 2], tokens of input and target.
        ends: uint8[rows, 2], how many of these one family of models has apart.
        tasks: names of the samples' tasks, sorted.
        task_ids: int16[rows], places among these; -1 of a row without a sample.
    """

    def __init__(self, staging: Staging, entries: int) -> None:
        self.rows = rows = staging.samples()
        self.spans = staging.spans()
        self.texts = staging.texts
        self.given = ~np.isin(rows["status"], _GAVE_NONE)
        bounds = np.searchsorted(rows["entry"], np.arange(entries + 1))
        self.entries = [slice(first, end) for first, end in itertools.pairwise(bounds.tolist())]
        self.lengths = np.stack([rows["input"], rows["target"]], 1)
        self.ends = np.stack([rows["input_end"], rows["target_end"]], 1)
        self.tasks = sorted(self.texts[at] for at in np.unique(rows["task"][self.given]))
        places = {name: at for at, name in enumerate(self.tasks)}
        of_texts = np.array([places.get(text, -1) for text in self.texts], np.int16)
        self.task_ids = np.where(self.given, of_texts[rows["task"]], np.int16(-1))

    def by_task(self, chosen: Array) -> dict[str, int]:
        """How many samples of each task are chosen."""
        counts = np.bincount(self.task_ids[chosen], minlength=len(self.tasks))
        return {name: int(count) for name, count in zip(self.tasks, counts, strict=True) if count}

    def tasks_of(self, entry: int) -> list[str]:
        """The tasks of an entry's samples."""
        rows = self.entries[entry]
        return [self.tasks[at] for at in np.unique(self.task_ids[rows][self.given[rows]])]


def assign_splits(
    digests: npt.NDArray[np.uint64], valid_fraction: float, test_fraction: float
) -> npt.NDArray[np.uint8]:
    """Gives samples their splits: the smallest digests are for testing, the next ones for validation.

    The order of the samples does not matter. A fraction above 0 gives at least one sample, as long as one is left for
    training.

    Returns:
        uint8[n], places in `SPLITS`.
    """
    count = len(digests)
    splits = np.zeros(count, np.uint8)
    order = np.argsort(digests, kind="stable")  # ties go to the sample that came first
    taken = 0
    for split, fraction in (("test", test_fraction), ("valid", valid_fraction)):
        number = min(max(round(fraction * count), fraction > 0), count - 1 - taken)
        splits[order[taken : taken + number]] = SPLITS.index(split)
        taken += number
    return splits


def decide(samples: Samples, tasks: Sequence[TaskSpec], settings: PrepareSettings) -> Array:
    """Each row's split, or `LEFT_OUT`; duplicates and samples over a limit get that as their status.

    Returns:
        uint8[rows].

    Raises:
        DataError: no sample is left for training.
    """
    digests, statuses = samples.rows["digest"], samples.rows["status"]
    splits = np.full(len(statuses), LEFT_OUT, np.uint8)

    def leave_out(rows: Array, reason: Skipped) -> None:
        statuses[rows[statuses[rows] <= TRUNCATED]] = status_of(reason)

    for spec, entry in zip(tasks, samples.entries, strict=True):
        # Samples that are left out for their text count, so that the others' splits do not depend on maximum lengths.
        rows = entry.start + np.flatnonzero(samples.given[entry])
        if spec.deduplicate:
            _, firsts = np.unique(digests[rows], return_index=True)
            again = np.ones(len(rows), np.bool_)
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
        others = ": all others are too long or empty" if samples.given.any() else ""
        raise DataError(f"expected at least 1 sample for training, got 0{others}")
    return splits


def write_dataset(
    staging: Staging,
    tokens: Path,
    folder: Path,
    *,
    mixture: Mixture,
    settings: PrepareSettings,
    tokenizer: Tokenizer,
    fingerprint: str,
    recipe: str,
) -> DatasetMeta:
    """Write the files of all splits into a folder, and return its manifest.

    Raises:
        DataError: no sample is left for training, or a task is in two entries of the mixture.
    """
    samples = Samples(staging, len(mixture.tasks))
    entries = _tasks_of_entries(samples)
    splits = decide(samples, mixture.tasks, settings)
    dtype = token_dtype(len(tokenizer))
    _write_tokens(tokens, folder, splits, samples.lengths, dtype)
    lost = _bits(samples, list(staging.not_written)[:MOST_LOST])
    for place, split in enumerate(SPLITS):
        _write_split(folder / split, samples, splits == place, dtype, lost)
    files = {path.name: FileDigests.of(path) for split in SPLITS for path in files_of(folder, split)}
    counts = {split: samples.by_task(splits == place) for place, split in enumerate(SPLITS)}
    sides = {name: spec.side for spec, of in zip(mixture.tasks, entries, strict=True) for name in of}
    read = np.bincount(samples.rows["task"], minlength=len(samples.texts))
    statuses = samples.rows["status"]
    skipped = np.bincount(statuses, minlength=status_of(tuple(Skipped)[-1]) + 1)
    kept = samples.lengths[splits != LEFT_OUT] - samples.ends[splits != LEFT_OUT] * [0, 1]
    longest = kept.max(0).tolist()  # a target's end token does not count
    return DatasetMeta(
        source=settings.source,
        tasks=tuple(samples.tasks),
        samples=counts,
        read={name: int(count) for name, count in sorted(zip(samples.texts, read, strict=True)) if count},
        skipped={str(reason): int(count) for reason in Skipped if (count := skipped[status_of(reason)])},
        truncated=samples.by_task(statuses == TRUNCATED),
        not_written=staging.not_written | _mostly_empty(staging, samples, mixture),
        rates={} if mixture.is_even else task_rates(mixture, entries, counts["train"]),
        sides={name: side for name, side in sides.items() if side is not TruncationSide.RIGHT},
        loss="everything" if all(spec.text for spec in mixture.tasks) else "targets",
        lengths=_histogram(samples.lengths[splits == 0]),
        vocabulary_size=len(tokenizer),
        pad_id=pad_id(tokenizer),
        bos_id=start_id(tokenizer),
        eos_id=tokenizer.eos_token_id,
        max_input_length=settings.max_input_length or max(longest[0], 1),
        max_target_length=settings.max_target_length or max(longest[1], 1),
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


def _tasks_of_entries(samples: Samples) -> list[list[str]]:
    seen: set[str] = set()
    names = [samples.tasks_of(entry) for entry in range(len(samples.entries))]
    for of_entry in names:
        if twice := seen & set(of_entry):
            raise DataError(
                f"expected every task in one entry of the mixture, {min(twice)} is in two",
                hint="give one of them another name",
            )
        seen |= set(of_entry)
    return names


def _histogram(lengths: Array) -> dict[str, dict[str, int]]:
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return {
        name: {str(2**power): int(count) for power, count in enumerate(np.bincount(powers[:, at])) if count}
        for at, name in enumerate(("input", "target"))
    }


def _bits(samples: Samples, names: Sequence[str]) -> Array:
    """Give each row a bit for each of these names that its template has not written: uint64[rows]."""
    sets = [set(text.split("\n")) for text in samples.texts]
    bits = [sum(1 << at for at, name in enumerate(names) if name in lost) for lost in sets]
    return np.take(np.array(bits, np.uint64), samples.rows["lost"])


def _write_tokens(source: Path, folder: Path, splits: Array, lengths: Array, dtype: np.dtype[Any]) -> None:
    """Write the staged tokens to the files of their splits."""
    sizes = lengths.sum(1, dtype=np.int64)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(data_path(folder / split).open("wb")) for split in SPLITS]
        # Read rather than mapped: mapped tokens stay resident.
        staged = stack.enter_context(source.open("rb"))
        for first in range(0, len(sizes), _SAMPLES_AT_ONCE):
            part = slice(first, first + _SAMPLES_AT_ONCE)
            tokens = np.fromfile(staged, dtype, int(sizes[part].sum()))
            of = np.repeat(splits[part], sizes[part])
            for place, file in enumerate(files):
                file.write(tokens[of == place].tobytes())
        for file in files:
            sync(file)


def _write_split(prefix: Path, samples: Samples, chosen: Array, dtype: np.dtype[Any], lost: Array) -> None:
    """Write what a split has next to its tokens; `chosen` are its rows."""
    spans = samples.spans[chosen[samples.spans[:, 0]]]
    spans[:, 0] = (np.cumsum(chosen) - 1)[spans[:, 0]]
    checksums = samples.rows["checksum"][chosen]
    write_split(prefix, dtype, samples.lengths[chosen], samples.task_ids[chosen], checksums, spans)
    if samples.ends.any():
        save_array(ends_path(prefix), samples.ends[chosen].reshape(-1))
    if lost.any():
        save_array(lost_path(prefix), lost[chosen])


def _mostly_empty(staging: Staging, samples: Samples, mixture: Mixture) -> Counter[str]:
    """The columns that a template names and that are empty in most rows of their entry."""
    mostly = Counter[str]()
    for (entry, column), count in staging.empty.items():
        if count > samples.given[samples.entries[entry]].sum() / 2:
            spec = mixture.tasks[entry]
            mostly[f"rows of {spec.name or spec.task_column} in which {column!r} is empty"] = count
    return mostly
