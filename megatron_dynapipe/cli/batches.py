"""Lengths of global batches, without the samples: from a batches file (`docs/comparing.md`), or a dataset's sampler."""

import re
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.files import read_unpacked
from megatron_dynapipe.sampling import (
    GlobalBatch,
    LengthTable,
    LongSamples,
    Sampler,
    SamplerSettings,
    SpanTable,
    read_task_ids,
)

FORMAT = "dynapipe-batches/1"

_Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class NamedBatch(msgspec.Struct, frozen=True):
    """One global batch: lengths in tokens. Other keys are ignored.

    Attributes:
        input: tokens of every sample's input.
        target: tokens of every sample's target; absent for decoder-only models.
        max_seq_len: the most tokens that an input or a target may have; None where nobody said.
        max_target_len: the most that a target may have, where that is another number.
        labels: how many positions of each decoder-only sample count, its last ones; absent where all do.
    """

    id: str
    input: list[_Length]
    target: list[_Length] | None = None
    max_seq_len: _Length | None = None
    max_target_len: _Length | None = None
    labels: list[Annotated[int, msgspec.Meta(lt=2**31)]] | None = None

    def global_batch(self, iteration: int) -> GlobalBatch:
        """The batch as the planner takes it, its samples numbered by their place."""
        return GlobalBatch.of_lengths(self.input, self.target or 0, labels=self.labels, iteration=iteration)


def dataset_batches(
    folder: Path,
    family: ModelFamily,
    *,
    batches: int,
    samples: int,
    seed: int,
    tokens: int | None = None,
    max_seq_len: int | None = None,
    max_target_len: int | None = None,
    loss_on: str | None = None,
) -> list[NamedBatch]:
    """The first global batches of a dataset's training split, as a run with this seed draws them, tasks at their rates.

    Each has so many samples, or `tokens` at most; longer inputs (decoder-only: with their targets) and longer targets
    are truncated. What counts is as `loss_on` (`data.spans.LossOn`), else as the dataset says.

    Raises:
        DataError: the dataset is missing or damaged.
        ConfigError: no samples, or a seed below 0.
    """
    meta = read_meta(folder)
    lengths = LengthTable.read(folder, "train", family)
    has_targets = family.is_encoder_decoder
    longest_input = meta.max_input_length + (0 if has_targets else meta.max_target_length + 1)
    settings = SamplerSettings(
        family=family,
        seed=seed,
        samples_per_iteration=samples,
        tokens_per_iteration=tokens,
        max_input_length=max_seq_len or max(longest_input, 2),
        max_target_length=(max_target_len or meta.max_target_length) if has_targets else 0,
        long_samples=LongSamples.TRUNCATE,
        sides=meta.task_sides,
        task_rates=meta.task_rates,
        labels=not has_targets and (loss_on or meta.loss) == "targets",
    )
    task_ids = read_task_ids(folder, "train", len(lengths)) if settings.needs_tasks else None
    sampler = Sampler(lengths, settings, task_ids, SpanTable.read(folder / "train"))
    longest = sampler.longest(2)
    return [
        NamedBatch(
            id=f"iteration-{batch.iteration}",
            input=batch.input_lengths.tolist(),
            target=batch.target_lengths.tolist() if has_targets else None,
            max_seq_len=int(longest.input_lengths.max()),
            max_target_len=int(longest.target_lengths.max()) if has_targets else None,
            labels=None if batch.labels is None else batch.labels.tolist(),
        )
        for batch in map(sampler.batch, range(batches))
    ]


class _File(msgspec.Struct, frozen=True):
    format: str
    batches: list[NamedBatch]


def read_batches(
    path: Path, family: ModelFamily, *, max_seq_len: int | None = None, max_target_len: int | None = None
) -> list[NamedBatch]:
    """The batches of a file (`.gz`: compressed) of a kind: with targets for T5, without for decoder-only models.

    Longer inputs and targets are truncated.

    Raises:
        DataError: not of this format, an id that is no name or not the only one, input and target of
            different numbers, or none of this kind.
    """
    try:
        file = msgspec.json.decode(read_unpacked(path), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a batches file: {error}") from error
    if file.format != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT!r}, got {file.format!r}")
    _check_ids(path, file.batches)
    for batch in file.batches:
        if batch.target is not None and len(batch.target) != len(batch.input):
            raise DataError(f"{path}: batch {batch.id} has {len(batch.input)} inputs and {len(batch.target)} targets")
        _check_labels(path, batch)
    chosen = [batch for batch in file.batches if (batch.target is not None) == family.is_encoder_decoder]
    if not chosen:
        kind = "with" if family.is_encoder_decoder else "without"
        raise DataError(f"{path}: expected batches {kind} targets for a {family} model, found none")
    return [_truncated(batch, max_seq_len, max_target_len) for batch in chosen]


def _check_ids(path: Path, batches: list[NamedBatch]) -> None:
    """Plans are written to files of these names."""
    seen = set()
    for batch in batches:
        if not _NAME.fullmatch(batch.id):
            raise DataError(
                f"{path}: expected ids of 1 to 128 letters, digits, dots, dashes or underscores, got {batch.id!r}",
                hint="an id is a name, not a path: plans are written to files of these names",
            )
        if batch.id in seen:
            raise DataError(f"{path}: expected every id once, got {batch.id!r} twice")
        seen.add(batch.id)


def _check_labels(path: Path, batch: NamedBatch) -> None:
    """Refuse labels unless each sample has some number from 0 to its positions, which are its tokens but the first."""
    if batch.labels is None:
        return
    if batch.target is not None or len(batch.labels) != len(batch.input):
        raise DataError(
            f"{path}: batch {batch.id}: expected labels of {len(batch.input)} decoder-only samples, got"
            f" {len(batch.labels)}" + ("" if batch.target is None else " of samples with targets of their own"),
            hint="labels say how many positions of each decoder-only sample count; leave them out where all do",
        )
    for sample, (labels, tokens) in enumerate(zip(batch.labels, batch.input, strict=True)):
        if not 0 <= labels <= max(tokens - 1, 1):
            raise DataError(
                f"{path}: batch {batch.id}, sample {sample}: expected 0 to {max(tokens - 1, 1)} labels of {tokens}"
                f" tokens, got {labels}",
                hint="every position but the last predicts a token, which may count",
            )


def _truncated(batch: NamedBatch, most_input: int | None, most_target: int | None) -> NamedBatch:
    if most_input is not None:
        known = batch.max_seq_len or most_input
        batch = msgspec.structs.replace(
            batch,
            input=[min(n, most_input) for n in batch.input],
            max_seq_len=min(known, most_input),
            labels=batch.labels
            and [min(n, max(most_input - 1, 1)) for n in batch.labels],  # the last ones, which truncation keeps
        )
    if most_target is not None and batch.target is not None:
        known = batch.max_target_len or batch.max_seq_len or most_target
        batch = msgspec.structs.replace(
            batch, target=[min(n, most_target) for n in batch.target], max_target_len=min(known, most_target)
        )
    return batch
