"""A mixture → a dataset folder: restartable, and in place only when it is whole.

sources ─► blocks ─► workers ─► staging files ─► splits ─► dataset folder ─► renamed into place
                                └ continued by the next run of the same command
"""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_dynapipe.data.identity import file_digests, files_of, meta_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, read_meta, tokenizer_folder, write_meta
from megatron_dynapipe.data.mixture.rows import Block
from megatron_dynapipe.data.mixture.sources import Rows, Source
from megatron_dynapipe.data.mixture.spec import Mixture, plain_mixture
from megatron_dynapipe.data.prepare import assemble, describe
from megatron_dynapipe.data.prepare.encode import EncodedBlock, WorkOrder
from megatron_dynapipe.data.prepare.pool import WorkerEndedError, encoded_by, encoded_here
from megatron_dynapipe.data.prepare.settings import Prepared, PrepareSettings, TextSample
from megatron_dynapipe.data.prepare.staging import (
    Checkpoint,
    Staging,
    clear,
    read_checkpoint,
    staging_folder,
)
from megatron_dynapipe.data.prepare.vocabulary import make_tokenizer
from megatron_dynapipe.data.tokenizer import fingerprint, load_tokenizer, sentinel_ids
from megatron_dynapipe.errors import DataError, DynaPipeError

_LITTLE_BYTES = 4_000_000
"""Text for which no worker is started."""
_RECIPE = 1
"""Raised when the same sources and settings give another dataset."""

Progress = Callable[[int, int, int], None]
"""Called with bytes read, bytes in all (0 where unknown), and samples so far."""


def prepare_dataset(samples: Sequence[TextSample], output: Path, settings: PrepareSettings) -> Prepared:
    """`prepare_mixture` of samples in memory, split as one."""
    if not samples:
        raise DataError("expected at least 1 sample, got 0")
    return prepare_mixture(plain_mixture(("samples",)), [Rows(samples)], output, settings)


def prepare_mixture(
    mixture: Mixture,
    sources: Sequence[Source],
    output: Path,
    settings: PrepareSettings,
    *,
    progress: Progress = lambda *_: None,
) -> Prepared:
    """Write a mixture as a dataset folder at `output`, whole or not at all; replaces a dataset that was there.

    The folder is a function of sources, mixture, tokenizer and settings. Killed, the same call continues; done, it
    does nothing.

    Raises:
        DataError: a row cannot be used, the disk is full, or `output` holds something that is not a dataset.
    """
    output = output.absolute()
    _check_output(output)
    recipe = _recipe(mixture, sources, settings)
    replaced = _meta_of(output)
    if replaced is not None and replaced.recipe == recipe:
        return describe.unchanged(replaced, settings)
    try:
        with staging_folder(output) as folder:
            making = _Making(mixture, sources, settings, folder, recipe)
            try:
                meta = making.made(progress)
            except WorkerEndedError:
                raise
            except DynaPipeError:  # not a reason to begin where this run ended
                shutil.rmtree(folder)
                raise
            _put_in_place(folder, output)
            report, notes = making.report, making.notes
            shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{error.filename or output}: {error.strerror}") from error
        raise DataError(
            f"{output}: expected room on the disk, it is full: {error.strerror}",
            hint="make room and run the same command: it continues",
        ) from error
    return Prepared(meta=meta, long_samples=report, replaced=replaced, notes=notes)


class _Making:
    """One dataset on its way through a staging folder."""

    def __init__(
        self, mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings, folder: Path, recipe: str
    ) -> None:
        self._mixture, self._sources, self._settings = mixture, sources, settings
        self._folder, self._recipe = folder, recipe
        self.notes: tuple[str, ...] = ()

    def made(self, progress: Progress) -> DatasetMeta:
        """The new folder's manifest; the folder is `dataset` in the staging folder."""
        checkpoint = read_checkpoint(self._folder, self._recipe)
        if checkpoint is None:
            if any(self._folder.iterdir()):
                self.notes += ("an earlier run was of other text or settings: what it had done is dropped",)
            clear(self._folder)
            checkpoint = Checkpoint(recipe=self._recipe)
        elif checkpoint.blocks:
            self.notes += (f"continued after {sum(checkpoint.entries)} samples of an earlier run",)
        tokenizer = tokenizer_folder(self._folder)
        if not tokenizer.exists():
            make_tokenizer(self._mixture, self._sources, self._settings, tokenizer)
        loaded = load_tokenizer(tokenizer)
        staging = Staging(self._folder, checkpoint)
        try:
            order = self._order(tokenizer, len(loaded), sentinel_ids(loaded))
            for task, encoded in self._encoded(order, staging, progress):
                staging.add(task, encoded)
            staging.save()
        finally:
            staging.close()
        return self._assembled(staging, tokenizer, loaded)

    def _assembled(self, staging: Staging, tokenizer: Path, loaded: describe.Tokenizer) -> DatasetMeta:
        new = self._folder / "dataset"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        shutil.copytree(tokenizer, tokenizer_folder(new))
        names = sorted(staging.checkpoint.names)
        ranks = np.array([names.index(name) for name in staging.checkpoint.names], np.int16)
        splits = assemble.decide(staging, self._mixture.tasks, self._settings)
        assemble.check_training(splits)
        longest = [
            assemble.write_split(staging, new, split, splits == place, ranks, len(loaded))
            for place, split in enumerate(SPLITS)
        ]
        files = {path.name: file_digests(path) for split in SPLITS for path in files_of(new, split)}
        meta = describe.manifest(
            staging,
            splits,
            ranks,
            mixture=self._mixture,
            settings=self._settings,
            tokenizer=loaded,
            fingerprint=fingerprint(tokenizer),
            longest=(max(each[0] for each in longest), max(each[1] for each in longest)),
            files=files,
            recipe=self._recipe,
        )
        write_meta(new, meta)
        self.report = describe.long_samples(staging, self._settings)
        self.notes += describe.notes(self._mixture, meta)
        return meta

    def _order(self, tokenizer: Path, vocabulary: int, sentinels: tuple[int, ...]) -> WorkOrder:
        settings = self._settings
        return WorkOrder(
            tokenizer=str(tokenizer),
            tasks=self._mixture.tasks,
            vocabulary_size=vocabulary,
            sentinels=sentinels,
            max_input_length=settings.max_input_length,
            max_target_length=settings.max_target_length,
            long_samples=settings.long_samples,
            truncate=settings.truncate,
            skip_empty=settings.skip_empty,
            chat_template=self._mixture.chat_template,
        )

    def _encoded(self, order: WorkOrder, staging: Staging, progress: Progress) -> Iterator[tuple[int, EncodedBlock]]:
        """(entry, samples) of every block that is not staged yet."""
        total = sum(source.size for source in self._sources)
        tasks: list[tuple[int, int]] = []

        def jobs() -> Iterator[tuple[int, Block]]:
            before = number = 0
            for task, source in enumerate(self._sources):
                for block, done in source.blocks():
                    number += 1
                    if number > staging.continued:
                        tasks.append((task, before + done))
                        yield task, block
                before += source.size

        blocks: Iterable[tuple[Block, EncodedBlock]]
        if total and (total > _LITTLE_BYTES):
            blocks = encoded_by(self._settings.processes, order, jobs())
        else:
            blocks = encoded_here(order, jobs())
        for at, (_, encoded) in enumerate(blocks):
            task, done = tasks[at]
            yield task, encoded
            progress(done, total, staging.samples)


def _recipe(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> str:
    """Digest of all that a dataset follows from."""
    state = hashlib.blake2b(digest_size=16)
    chosen = {
        name: getattr(settings, name)
        for name in PrepareSettings.__dataclass_fields__
        if name not in ("tokenizer", "workers")
    }
    state.update(msgspec.json.encode([_RECIPE, mixture, chosen], order="sorted"))
    for source in sources:
        state.update("\0".join(source.fingerprint()).encode())
    if settings.tokenizer is not None:
        load_tokenizer(settings.tokenizer, pad_token=settings.pad_token)
        state.update(fingerprint(settings.tokenizer).encode())
    return state.hexdigest()


def _meta_of(folder: Path) -> DatasetMeta | None:
    """What a folder holds; None if it is absent, or no dataset of a known form."""
    try:
        return read_meta(folder)
    except DataError:
        return None


def _check_output(output: Path) -> None:
    if output.exists() and not meta_path(output).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(
            f"expected {output} to be absent, empty or a dataset folder, it is something else",
            hint="choose another folder",
        )


def _put_in_place(folder: Path, output: Path) -> None:
    """Rename the new dataset to its name; what was there is deleted with the staging folder."""
    if output.exists():
        # A folder cannot be renamed onto another.
        shutil.rmtree(folder / "old", ignore_errors=True)
        output.rename(folder / "old")
    (folder / "dataset").rename(output)
