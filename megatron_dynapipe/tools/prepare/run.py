"""Makes a dataset folder of a mixture; it gets its name when it is complete.

sources ─► blocks ─► workers ─► staging files ─► splits ─► dataset folder ─► renamed into place
"""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec
from tqdm import tqdm

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import fingerprint
from megatron_dynapipe.data.meta import FILES, DatasetMeta, read_meta, tokenizer_folder, write_meta
from megatron_dynapipe.processes import set_parent_death_signal
from megatron_dynapipe.tools.folders import delete_folder, replace_folder, restore_folder, strangers
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.sources import Source, rows_source
from megatron_dynapipe.tools.mixture.spec import Mixture, plain_mixture
from megatron_dynapipe.tools.prepare import staging as staging_files
from megatron_dynapipe.tools.prepare.assemble import write_dataset
from megatron_dynapipe.tools.prepare.encode import MOST_ERRORS, EncodedRows, Encoder, check_first_rows, status_of
from megatron_dynapipe.tools.prepare.settings import PrepareSettings, Skipped, TextSample
from megatron_dynapipe.tools.prepare.staging import Staging, clear, staging_folder
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer, load_tokenizer
from megatron_dynapipe.tools.prepare.training_text import make_tokenizer

_LITTLE_BYTES = 4_000_000
"""Text for which no worker is started."""
_RECIPE = 4
"""Raised when the same sources and settings give another dataset."""
_AHEAD = 2
"""Blocks on their way to or from each worker."""
_TERMINAL_S, _LOG_S = 0.2, 10.0
"""Between two states of the progress bar; in a log it begins after as many."""


type Prepared = tuple[DatasetMeta, tuple[str, ...]]
"""A dataset's description, and what else the user should know, a line each."""
type Job = tuple[int, Block, int]
"""Bytes of the sources up to a block's end, the block, and its entry."""


def prepare_dataset(samples: Sequence[TextSample], output: Path, settings: PrepareSettings) -> Prepared:
    """Call `prepare_mixture` with samples in memory, which are split together."""
    if not samples:
        raise DataError("expected at least 1 sample, got 0")
    return prepare_mixture(plain_mixture(("samples",)), [rows_source(samples)], output, settings)


def prepare_mixture(
    mixture: Mixture, sources: Sequence[Source], output: Path, settings: PrepareSettings, *, show_progress: bool = False
) -> Prepared:
    """Write a mixture as a dataset folder at `output`, whole or not at all; replaces a dataset that was there.

    The folder is a function of sources, mixture, tokenizer and settings. Done, the same call does nothing. Several
    processes are started for much text, as by `multiprocessing`: a script that calls this needs its `if __name__ ==
    "__main__"`.

    Raises:
        DataError: a row cannot be used, the disk is full, or `output` holds anything but a dataset.
        ConfigError: a template cannot be parsed.
    """
    try:
        output = output.resolve()
    except RuntimeError as error:  # links that lead to one another
        raise DataError(f"cannot write {output}: {error}") from error
    try:
        with staging_folder(output) as folder:
            return _prepare(mixture, sources, output, settings, folder, show_progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{error.filename or output}: {error.strerror or error}") from error
        raise DataError(
            f"{output}: expected room on the disk, it is full: {error.strerror}",
            hint="make room and run the same command",
        ) from error


def _prepare(
    mixture: Mixture,
    sources: Sequence[Source],
    output: Path,
    settings: PrepareSettings,
    folder: Path,
    show_progress: bool,
) -> Prepared:
    old = folder / staging_files.OLD
    restore_folder(output, aside=old)
    _delete_replaced(old)
    before = _dataset_at(output)
    check_first_rows(mixture, sources, settings)
    recipe = _recipe(mixture, sources, settings)
    if before is not None and before.recipe == recipe:
        clear(folder)
        return before, (f"{output} is made of the same already: nothing to do",)
    _check_replaceable(output)
    meta, notes = _made(mixture, sources, settings, folder, recipe, show_progress)
    _check_replaceable(output)  # that took long
    replace_folder(folder / staging_files.FINISHED, output, aside=old)
    _delete_replaced(old)
    clear(folder)
    if before is not None and before.content_hash != meta.content_hash:
        replaced = sum(before.split_samples.values())
        notes += (
            f"replaced another dataset in {output}: {replaced} samples of {before.source}, made of other sources or"
            " settings, or by an earlier version",
        )
    return meta, notes


def _delete_replaced(old: Path) -> None:
    delete_folder(old, FILES)
    if old.exists():
        raise DataError(
            f"expected {old} to hold only the dataset that was replaced, it holds other files", hint="move them away"
        )


def _dataset_at(output: Path) -> DatasetMeta | None:
    """Read the dataset that is there; None if there is nothing. Raises DataError if it is anything else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        return read_meta(output)
    except DataError as error:
        raise DataError(
            f"expected {output} to be absent, empty or a dataset folder, it is something else: {error.message}",
            hint="choose another folder",
        ) from error


def _check_replaceable(output: Path) -> None:
    """Raise a DataError if a dataset's folder also holds other files, or may not be changed."""
    if others := strangers(output, FILES):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise DataError(
            f"expected nothing but a dataset in {output}, which is to be replaced, found {', '.join(others[:5])}{more}",
            hint="move that away, or choose another folder",
        )
    if output.exists() and not os.access(output, os.W_OK):
        raise DataError(f"cannot replace {output}: it is read-only", hint="choose another folder")


def _recipe(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> str:
    state = hashlib.blake2b(digest_size=16)
    chosen = {
        name: getattr(settings, name)
        for name in PrepareSettings.__dataclass_fields__
        if name not in ("tokenizer", "workers")
    }
    state.update(msgspec.json.encode([_RECIPE, mixture, chosen], order="sorted"))
    for part in (part for source in sources for part in source):
        state.update(part.fingerprint().encode())
    if settings.tokenizer is not None:
        state.update(fingerprint(settings.tokenizer).encode())
    return state.hexdigest()


def _made(
    mixture: Mixture,
    sources: Sequence[Source],
    settings: PrepareSettings,
    folder: Path,
    recipe: str,
    show_progress: bool,
) -> tuple[DatasetMeta, tuple[str, ...]]:
    """Make the dataset in a staging folder; returns its manifest, and notes for the user."""
    clear(folder)
    tokenizer = folder / staging_files.TOKENIZER
    fresh = folder / staging_files.FINISHED
    try:
        if show_progress and settings.tokenizer is None:
            print("training a tokenizer on the text", file=sys.stderr)
        _save_tokenizer(make_tokenizer(mixture, sources, settings), tokenizer)
        loaded = load_tokenizer(tokenizer)
        with contextlib.closing(Staging(folder)) as staging:
            _encode_all(Encoder(loaded, mixture, settings), sources, staging, settings.processes, show_progress)
        shutil.copytree(tokenizer, tokenizer_folder(fresh))
        digest = fingerprint(tokenizer)
        meta = write_dataset(
            staging,
            folder / staging_files.TOKENS,
            fresh,
            mixture=mixture,
            settings=settings,
            tokenizer=loaded,
            fingerprint=digest,
            recipe=recipe,
        )
        write_meta(fresh, meta)
    except Exception:
        clear(folder)
        raise
    return meta, tuple(_notes(mixture, meta, staging, loaded))


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizer library's own
        raise DataError(f"cannot write the tokenizer {folder}: {error}") from error


def _encode_all(
    encoder: Encoder, sources: Sequence[Source], staging: Staging, processes: int, show_progress: bool
) -> None:
    total = sum(part.size for source in sources for part in source)
    on_terminal = sys.stderr.isatty()
    with tqdm(
        total=total or None,
        desc="tokenising",
        unit="B" if total else " samples",
        unit_scale=bool(total),
        disable=not show_progress,
        mininterval=_TERMINAL_S if on_terminal else _LOG_S,
        delay=0 if on_terminal else _LOG_S,
    ) as bar:
        for read, encoded in _encoded(encoder, _jobs(sources), processes if total > _LITTLE_BYTES else 0):
            staging.add(encoded)
            bar.set_postfix_str(f"{staging.rows} samples", refresh=False)
            bar.update((read if total else staging.rows) - bar.n)


def _jobs(sources: Sequence[Source]) -> Iterator[Job]:
    before = 0
    for entry, source in enumerate(sources):
        for part in source:
            yield from ((before + block.done, block, entry) for block in part.blocks())
            before += part.size


def _encoded(encoder: Encoder, jobs: Iterable[Job], workers: int) -> Iterator[tuple[int, EncodedRows]]:
    """Encode blocks in so many processes, 0 for this one; gives them in order, with how far sources are read."""
    if not workers:
        yield from ((read, encoder(block, entry)) for read, block, entry in jobs)
        return
    context = multiprocessing.get_context("spawn")  # the tokenizer library and pyarrow have threads
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoder,))
    waiting: deque[tuple[int, Future[EncodedRows]]] = deque()
    try:
        for read, block, entry in jobs:
            waiting.append((read, pool.submit(_encode_in_worker, block, entry)))
            if len(waiting) >= _AHEAD * workers:
                before, rows = waiting.popleft()
                yield before, rows.result()
        yield from ((read, rows.result()) for read, rows in waiting)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises has ended before its work was done",
            hint="its output is above; memory may have run out: try --workers 1",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_encoder: Encoder


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    set_parent_death_signal(signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = encoder


def _encode_in_worker(block: Block, entry: int) -> EncodedRows:
    return _worker_encoder(block, entry)


def _notes(mixture: Mixture, meta: DatasetMeta, staging: Staging, tokenizer: Tokenizer) -> Iterator[str]:
    """Tell which rows were changed or left out, and which tasks have fewer samples than were asked for."""
    if truncated := sum(meta.truncated.values()):
        yield f"{truncated} of {sum(meta.read.values())} samples were truncated to the maximum lengths"
    for reason, count in meta.skipped.items():
        yield f"{f'{count} samples were' if count > 1 else '1 sample was'} left out: {reason.replace('_', ' ')}"
        errors = [error for status, error in staging.errors if status == status_of(Skipped(reason))]
        yield from (f"  {error}" for error in errors[:MOST_ERRORS])
    yield from (f"{name}, which the template does not write: {count}" for name, count in meta.not_written.items())
    yield from (f"{remark}: {count}" for remark, count in sorted(staging.remarks.items()))
    if tokenizer.pad_token_id is None:
        yield (
            f"the tokenizer has no pad token: its end token {tokenizer.eos_token!r} fills padded rows, where it does"
            " not count (--pad-token names another)"
        )
    for spec in mixture.tasks:
        if isinstance(spec.template, str) and re.search(r"\n\s*\|\|\||\|\|\|\s*\n", spec.template):
            yield f"task {spec.name}: newlines at ||| are left out; `template: {{input: …, target: …}}` keeps them"
        there = meta.read.get(spec.name or "", 0)
        if spec.name is not None and there < (spec.limit or 0):
            yield f"task {spec.name}: {spec.limit} samples were asked for, it has {there}"
