"""Text tasks → a tokenised dataset folder (`meta` draws it)."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from megatron_dynapipe.data import tokenizer as tokenizers
from megatron_dynapipe.data.identity import file_digests, files_of
from megatron_dynapipe.data.indexed import IndexedWriter
from megatron_dynapipe.data.meta import FORMAT, SPLITS, TOKENIZER_FOLDER, DatasetMeta, meta_path, read_meta, write_meta
from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.sampling.lengths import task_ids_path
from megatron_dynapipe.sampling.long_samples import LongSampleReport, LongSamples

_ENCODED_AT_ONCE = 1000
_MOST_TASKS = 2**15


class TextSample(msgspec.Struct, frozen=True):
    """One (input, target) pair of one task; other fields of a row are ignored."""

    task: str
    input: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """How text becomes a dataset folder.

    Attributes:
        source: where the text came from, in words, for `meta.json`.
        tokenizer: folder of a HuggingFace tokenizer; None trains one on the text.
        vocabulary_size: entries of a trained tokenizer.
        valid_fraction: fraction of the samples for validation.
        test_fraction: fraction of the samples for testing.
        max_input_length: longest input in tokens; None for no maximum.
        max_target_length: longest target in tokens, without start and end tokens; None for no maximum.
        long_samples: what to do with longer ones.
        skip_empty: leave out samples whose input or target is empty, instead of refusing them.
    """

    source: str
    tokenizer: Path | None = None
    vocabulary_size: int = 4096
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    max_input_length: int | None = None
    max_target_length: int | None = None
    long_samples: LongSamples = LongSamples.FAIL
    skip_empty: bool = False

    def __post_init__(self) -> None:
        if not (self.valid_fraction >= 0 and self.test_fraction >= 0 and self.valid_fraction + self.test_fraction < 1):
            raise ConfigError(
                "expected fractions of at least 0 for validation and test, together below 1, got"
                f" {self.valid_fraction} and {self.test_fraction}"
            )
        if not 1 <= self.vocabulary_size < 2**31:
            raise ConfigError(f"expected a vocabulary of 1 to {2**31 - 1} entries, got {self.vocabulary_size}")
        for name in ("max_input_length", "max_target_length"):
            maximum = getattr(self, name)
            if maximum is not None and maximum < 1:
                raise ConfigError(f"expected {name} of at least 1, got {maximum}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was written, and what was not.

    Attributes:
        meta: the dataset's description.
        long_samples: samples over the maximum lengths, and what became of them.
        empty_samples: samples left out because their input or target was empty.
        replaced: the dataset that was there before, if there was one of a known form.
    """

    meta: DatasetMeta
    long_samples: LongSampleReport
    empty_samples: int
    replaced: DatasetMeta | None = None


def prepare_dataset(samples: Sequence[TextSample], output: Path, settings: PrepareSettings) -> Prepared:
    """Write `samples` as a dataset folder at `output`, whole or not at all; replaces a dataset that was there.

    The folder is a function of the samples and the settings alone.

    Raises:
        DataError: a sample is empty or too long, or `output` holds something that is not a dataset.
    """
    if not samples:
        raise DataError("expected at least 1 sample, got 0")
    names = tuple(sorted({sample.task for sample in samples}))
    if len(names) > _MOST_TASKS:
        raise DataError(f"expected at most {_MOST_TASKS} tasks, got {len(names)}")
    replaced = _meta_of(output)
    with _new_folder(output) as folder:
        tokenizer = _tokenizer(samples, settings)
        tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        writing = _DatasetWriting(folder, settings, len(tokenizer), names)
        with ExitStack() as stack:
            writing.open(stack)
            splits = assign_splits(samples, settings.valid_fraction, settings.test_fraction)
            for first in range(0, len(samples), _ENCODED_AT_ONCE):
                rows = samples[first : first + _ENCODED_AT_ONCE]
                inputs = tokenizers.encode(tokenizer, [sample.input for sample in rows])
                targets = tokenizers.encode(tokenizer, [sample.target for sample in rows])
                for at, sample in enumerate(rows):
                    writing.add(first + at, splits[first + at], sample.task, inputs[at], targets[at])
        meta = DatasetMeta(
            format=FORMAT,
            source=settings.source,
            tasks=names,
            samples=writing.write_task_ids(),
            vocabulary_size=len(tokenizer),
            pad_id=tokenizer.pad_token_id,
            bos_id=tokenizers.start_id(tokenizer),
            eos_id=tokenizer.eos_token_id,
            max_input_length=settings.max_input_length or writing.longest[0],
            max_target_length=settings.max_target_length or writing.longest[1],
            files={path.name: file_digests(path) for split in SPLITS for path in files_of(folder, split)},
        )
        write_meta(folder, meta)
    return Prepared(
        meta=meta,
        long_samples=writing.report(len(samples)),
        empty_samples=writing.empty_samples,
        replaced=replaced,
    )


def _meta_of(folder: Path) -> DatasetMeta | None:
    """What a folder holds; None if it is absent, or no dataset of a known form."""
    try:
        return read_meta(folder)
    except DataError:
        return None


def assign_splits(samples: Sequence[TextSample], valid_fraction: float, test_fraction: float) -> list[str]:
    """The split of each sample: the samples with the smallest digests of their text are for testing, then validation.

    Independent of the order of the samples. A fraction above 0 gives at least one sample, as long as one is left for
    training.
    """
    digests = [
        hashlib.blake2b("\0".join((sample.task, sample.input, sample.target)).encode(), digest_size=16).digest()
        for sample in samples
    ]
    order = sorted(range(len(samples)), key=lambda at: (digests[at], at))
    splits = ["train"] * len(samples)
    taken = 0
    for split, fraction in (("test", test_fraction), ("valid", valid_fraction)):
        count = min(max(round(fraction * len(samples)), fraction > 0), len(samples) - 1 - taken)
        for at in order[taken : taken + count]:
            splits[at] = split
        taken += count
    return splits


class _DatasetWriting:
    """The files of a dataset folder while it is written, and what has been counted."""

    def __init__(self, folder: Path, settings: PrepareSettings, vocabulary_size: int, names: tuple[str, ...]) -> None:
        self._folder = folder
        self._settings = settings
        self._vocabulary_size = vocabulary_size
        self._task_index = {name: index for index, name in enumerate(names)}
        self._writers: dict[str, IndexedWriter] = {}
        self._tasks: dict[str, list[int]] = {split: [] for split in SPLITS}
        self.longest = (0, 0)
        self.empty_samples = 0
        self._long_inputs = self._long_targets = self._long_samples = 0

    def open(self, stack: ExitStack) -> None:
        """Open the files of every split; leaving `stack` closes them, or drops them after an error."""
        for split in SPLITS:
            self._writers[split] = stack.enter_context(IndexedWriter(self._folder / split, self._vocabulary_size))

    def add(self, row: int, split: str, task: str, input_ids: list[int], target_ids: list[int]) -> None:
        """Write one tokenised sample, after applying the maximum lengths."""
        for name, ids in (("input", input_ids), ("target", target_ids)):
            if not ids and not self._settings.skip_empty:
                raise DataError(
                    f"expected every {name} to have at least 1 token, sample {row} (task {task!r}) has 0",
                    hint="take such samples out of the text, or use --skip-empty",
                )
        if not input_ids or not target_ids:
            self.empty_samples += 1
            return
        maximum = (self._settings.max_input_length, self._settings.max_target_length)
        long_input, long_target = (
            limit is not None and len(ids) > limit for ids, limit in zip((input_ids, target_ids), maximum, strict=True)
        )
        if long_input or long_target:
            self._long_inputs += long_input
            self._long_targets += long_target
            self._long_samples += 1
            if self._settings.long_samples is LongSamples.FAIL:
                raise DataError(
                    f"expected samples of at most {maximum[0]} input and {maximum[1]} target tokens, sample {row}"
                    f" (task {task!r}) has {len(input_ids)} and {len(target_ids)}",
                    hint="raise the maximum length, or use --long-samples truncate (or skip)",
                )
            if self._settings.long_samples is LongSamples.SKIP:
                return
        input_ids, target_ids = input_ids[: maximum[0]], target_ids[: maximum[1]]
        self._writers[split].add(input_ids, target_ids)
        self._tasks[split].append(self._task_index[task])
        self.longest = (max(self.longest[0], len(input_ids)), max(self.longest[1], len(target_ids)))

    def write_task_ids(self) -> dict[str, int]:
        """Write each split's task indices; the samples of each split."""
        if not self._tasks["train"]:
            raise DataError("expected at least 1 sample for training, got 0: all others are too long or empty")
        for split, tasks in self._tasks.items():
            np.save(task_ids_path(self._folder, split), np.asarray(tasks, np.int16))
        return {split: len(tasks) for split, tasks in self._tasks.items()}

    def report(self, samples: int) -> LongSampleReport:
        """What happened to long samples."""
        return LongSampleReport(
            policy=self._settings.long_samples,
            samples=samples,
            long_inputs=self._long_inputs,
            long_targets=self._long_targets,
            long_samples=self._long_samples,
        )


def _tokenizer(samples: Sequence[TextSample], settings: PrepareSettings) -> tokenizers.Tokenizer:
    """The tokenizer that was given, or one trained on all the text."""
    if settings.tokenizer is not None:
        return tokenizers.load_tokenizer(settings.tokenizer)
    texts = (text for sample in samples for text in (sample.input, sample.target))
    return tokenizers.train_tokenizer(texts, settings.vocabulary_size)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A new folder that replaces `output` when the block ends without an error.

    Raises:
        DataError: `output` exists and is neither empty nor a dataset.
    """
    output = output.absolute()
    if output.exists() and not meta_path(output).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(
            f"expected {output} to be absent, empty or a dataset folder, it is something else",
            hint="choose another folder",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as unfinished:
        folder = Path(unfinished) / "new"
        folder.mkdir()
        yield folder
        if output.exists():
            # A folder cannot be renamed onto another: the old one is deleted with the temporary folder.
            shutil.move(output, Path(unfinished) / "old")
        folder.rename(output)
