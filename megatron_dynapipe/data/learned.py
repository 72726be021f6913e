"""Samples whose learned tokens are known, as a dataset folder.

tokens    a b c d e f      learned    . . 1 . 1 1
here      input  a b c d │ target e f                 c in the input, learned (a span)
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import FileDigests, files_of, manifest_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, write_meta
from megatron_dynapipe.data.writing import token_dtype, write_split
from megatron_dynapipe.outputs import say
from megatron_dynapipe.sampling.lengths import data_path

Sample = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Tokens, and for each of them whether it is learned; the first never is, the last one is."""


def target_start(learned: npt.NDArray[np.bool_]) -> int:
    """The index at which the run of learned tokens begins that ends a sample."""
    return int(np.flatnonzero(~learned)[-1]) + 1


def spans(learned: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and end of the runs of learned tokens before that."""
    before = learned[: target_start(learned)].astype(np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], before, [0]])))
    yield from ((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def write_learned(
    folder: Path,
    splits: Mapping[str, Iterable[Sample | None]],
    *,
    source: str,
    task: str,
    vocabulary_size: int,
    pad_id: int,
    eos_id: int,
) -> None:
    """Write samples to a new folder.

    Args:
        folder: where; its manifest is written last, so that a folder that has one is whole.
        splits: samples of training, validation and test, by the splits' names; None where nothing of one is learned.
        source: where they come from, in words.
        task: the name of their only task.
        vocabulary_size: the tokenizer's.
        pad_id: rows are filled up with it.
        eos_id: ends a text.

    Raises:
        DataError: nothing of any training sample is learned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, dict[str, int]] = {}
    longest = [1, 1]
    for split in SPLITS:
        lengths = _write_split(folder / split, splits.get(split, ()), vocabulary_size)
        counts[split] = {task: len(lengths)} if len(lengths) else {}
        longest = np.maximum(longest, lengths.max(axis=0)).tolist() if len(lengths) else longest
    if not counts["train"]:
        raise DataError(f"expected samples with a learned token, the training samples of {source} have none")
    meta = DatasetMeta(
        source=source,
        tasks=(task,),
        samples=counts,
        loss="targets",
        vocabulary_size=vocabulary_size,
        pad_id=pad_id,
        bos_id=0,
        eos_id=eos_id,
        max_input_length=longest[0],
        max_target_length=longest[1],
        files={path.name: FileDigests.of(path) for split in SPLITS for path in files_of(folder, split)},
    )
    write_meta(folder, meta)


def is_written(folder: Path) -> bool:
    """Whether a folder was written to its end."""
    return manifest_path(folder).is_file()


def _write_split(prefix: Path, samples: Iterable[Sample | None], vocabulary: int) -> npt.NDArray[np.int32]:
    """Write one split's files; lengths of input and target, int32[samples, 2]."""
    lengths: list[tuple[int, int]] = []
    checksums: list[int] = []
    earlier: list[tuple[int, int, int]] = []
    skipped = 0
    dtype = token_dtype(vocabulary)
    with data_path(prefix).open("wb") as file:
        for sample in samples:
            if sample is None:
                skipped += 1
                continue
            tokens, learned = sample
            target = target_start(learned)
            earlier += [(len(lengths), first, end) for first, end in spans(learned)]
            lengths.append((target, len(tokens) - target))
            stored = tokens.astype(dtype).tobytes()
            checksums.append(zlib.crc32(stored))
            file.write(stored)
    if skipped:
        total = skipped + len(lengths)
        say(f"{prefix.name}: {skipped} of {total} samples are left out, as nothing of them is learned")
    pairs = np.array(lengths, np.int32).reshape(-1, 2)
    tasks = np.zeros(len(pairs), np.int16)
    write_split(prefix, dtype, pairs, tasks, np.array(checksums, np.uint32), np.array(earlier, np.int64).reshape(-1, 3))
    return pairs
