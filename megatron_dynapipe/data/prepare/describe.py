"""What a dataset's manifest says, and what its maker is told."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta
from megatron_dynapipe.data.mixture.rates import task_rates
from megatron_dynapipe.data.mixture.spec import Mixture
from megatron_dynapipe.data.prepare import assemble
from megatron_dynapipe.data.prepare.encode import LONG_INPUT, LONG_TARGET
from megatron_dynapipe.data.prepare.settings import Prepared, PrepareSettings, Skipped
from megatron_dynapipe.data.prepare.staging import Staging
from megatron_dynapipe.data.tokenizer import start_id
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.long_samples import LongSampleReport, LongSamples

Tokenizer = Any


def manifest(
    staging: Staging,
    splits: npt.NDArray[np.uint8],
    ranks: npt.NDArray[np.int16],
    *,
    mixture: Mixture,
    settings: PrepareSettings,
    tokenizer: Tokenizer,
    fingerprint: str,
    longest: tuple[int, int],
    files: Mapping[str, FileDigests],
    recipe: str,
) -> DatasetMeta:
    """The manifest of a dataset whose split files are written; raises DataError if a task is in two entries."""
    names = tuple(sorted(staging.checkpoint.names))

    def by_task(chosen: npt.NDArray[np.bool_]) -> dict[str, int]:
        counts = assemble.task_counts(staging, ranks, chosen)
        return {names[at]: counts[at] for at in sorted(counts)}

    entries = _tasks_of_entries(staging, ranks, names)
    check_tasks(entries)
    samples = {split: by_task(splits == place) for place, split in enumerate(SPLITS)}
    long = np.asarray(staging.column("long")) > 0
    state = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    for name in sorted(files):
        state.update(f"\0{name}\0{files[name].whole}".encode())
    return DatasetMeta(
        source=settings.source,
        tasks=names,
        samples=samples,
        read=by_task(np.ones(len(splits), np.bool_)),
        skipped=assemble.skipped_counts(staging),
        truncated=by_task(long & (splits != assemble.LEFT_OUT)),
        rates={} if mixture.is_even else task_rates(mixture, entries, samples["train"]),
        loss="targets" if any(spec.messages for spec in mixture.tasks) else "everything",
        lengths=_histogram(staging, splits == 0),
        vocabulary_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
        bos_id=start_id(tokenizer),
        eos_id=tokenizer.eos_token_id,
        max_input_length=settings.max_input_length or max(longest[0], 1),
        max_target_length=settings.max_target_length or max(longest[1], 1),
        tokenizer=fingerprint,
        content_hash=state.hexdigest(),
        recipe=recipe,
        files=dict(files),
    )


def _tasks_of_entries(staging: Staging, ranks: npt.NDArray[np.int16], names: tuple[str, ...]) -> list[list[str]]:
    """The tasks of each entry of the mixture."""
    tasks, first, found = staging.column("tasks"), 0, []
    for count in staging.checkpoint.entries:
        found.append([names[at] for at in np.unique(ranks[tasks[first : first + count]])])
        first += count
    return found


def _histogram(staging: Staging, chosen: npt.NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    lengths = staging.column("lengths").reshape(-1, 2)
    found: dict[str, dict[str, int]] = {}
    for part, name in enumerate(("input", "target")):
        bins = np.ceil(np.log2(np.maximum(lengths[:, part][chosen], 1))).astype(np.int64)
        found[name] = {str(2**at): int(count) for at, count in enumerate(np.bincount(bins)) if count}
    return found


def long_samples(staging: Staging, settings: PrepareSettings) -> LongSampleReport:
    """What became of samples over the maximum lengths."""
    counts = np.bincount(staging.column("long"), minlength=4)
    return LongSampleReport(
        policy=settings.long_samples,
        samples=staging.samples,
        long_inputs=int(counts[LONG_INPUT] + counts[LONG_INPUT | LONG_TARGET]),
        long_targets=int(counts[LONG_TARGET] + counts[LONG_INPUT | LONG_TARGET]),
        long_samples=int(counts[1:].sum()),
    )


def unchanged(meta: DatasetMeta, settings: PrepareSettings) -> Prepared:
    """The report of a dataset that was there already."""
    long = sum(meta.truncated.values()) + meta.skipped.get(Skipped.TOO_LONG, 0)
    report = LongSampleReport(
        policy=settings.long_samples if long else LongSamples.FAIL,
        samples=sum(meta.read.values()),
        long_inputs=long,
        long_targets=0,
        long_samples=long,
    )
    return Prepared(meta=meta, long_samples=report, replaced=meta, is_new=False)


def notes(mixture: Mixture, meta: DatasetMeta) -> tuple[str, ...]:
    """What the user should know: samples left out, tasks with fewer samples than asked for."""
    found = [
        f"{f'{count} samples were' if count > 1 else '1 sample was'} left out: {reason.replace('_', ' ')}"
        for reason, count in meta.skipped.items()
    ]
    for spec in mixture.tasks:
        there = meta.read.get(spec.name or "", 0)
        if spec.name is not None and there < (spec.limit or 0):
            found += [f"task {spec.name}: {spec.limit} samples were asked for, it has {there}"]
    return tuple(found)


def check_tasks(entries: list[list[str]]) -> None:
    """Raises DataError where a task comes from two entries."""
    seen: set[str] = set()
    for names in entries:
        if twice := seen & set(names):
            raise DataError(
                f"expected every task in one entry of the mixture, {sorted(twice)[0]} is in two",
                hint="give one of them another name",
            )
        seen |= set(names)
