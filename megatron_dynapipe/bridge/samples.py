"""A recipe's own samples as a dataset folder, read once: the tokens that Bridge would train on, and which it learns.

    Bridge    tokens a b c d e    labels b c d e f    mask 0 1 0 1 0
    here      input  a b c d │ target e, learned          c in the input, learned (a span)

A sample ends with its last learned token: what follows it changes no loss.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import FileDigests, checksums_path, files_of, manifest_path
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, write_meta
from megatron_dynapipe.outputs import say
from megatron_dynapipe.sampling import spans_path
from megatron_dynapipe.sampling.lengths import data_path, task_ids_path
from megatron_dynapipe.tools.prepare.indexed import save_array, token_dtype, write_index

_TASK = "recipe"


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


def sample_of(dataset: Any, index: int) -> Sample | None:
    """A sample of a dataset of Bridge's, by its own collation; None where nothing of it is learned.

    Raises:
        DataError: its labels are not its tokens, one further.
    """
    batch = dataset.collate_fn([dataset[index]])
    tokens, labels, mask = (np.asarray(batch[name][0]) for name in ("tokens", "labels", "loss_mask"))
    counting = np.flatnonzero(mask)
    if not len(counting):
        return None
    end = int(counting[-1]) + 1
    if not np.array_equal(labels[: end - 1], tokens[1:end]):
        raise DataError(
            f"sample {index}: expected labels that are the tokens one further, got others",
            hint="train on a dataset of `megatron-dynapipe data prepare`",
        )
    whole = np.concatenate([tokens[:end], labels[end - 1 : end]]).astype(np.int64)
    return whole, np.concatenate([[False], mask[:end] != 0])


def digest(dataset: Any, tokenizer: Any) -> str:
    """What samples depend on, as a name: the recipe's description of them, and its tokenizer's."""
    text = json.dumps(
        [dataset, tokenizer], default=lambda value: getattr(value, "__dict__", str(value)), sort_keys=True
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write(folder: Path, datasets: tuple[Any, Any, Any], tokenizer: Any) -> None:
    """Write a recipe's datasets of training, validation and test to a new folder; any of them may be None.

    Args:
        folder: where; its manifest is written last, so that a folder that has one is whole.
        datasets: of Bridge.
        tokenizer: Bridge's, for the tokens that rows are padded with.

    Raises:
        DataError: nothing of any training sample is learned; or as `sample_of`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    samples: dict[str, dict[str, int]] = {}
    longest = [1, 1]
    for split, dataset in zip(SPLITS, datasets, strict=True):
        lengths = _write_split(folder / split, dataset, tokenizer.vocab_size)
        samples[split] = {_TASK: len(lengths)} if len(lengths) else {}
        longest = np.maximum(longest, lengths.max(axis=0)).tolist() if len(lengths) else longest
    if not samples["train"]:
        raise DataError("expected samples with a learned token, the recipe's training samples have none")
    pad = getattr(tokenizer, "pad_id", None)
    meta = DatasetMeta(
        source="a recipe of Megatron-Bridge",
        tasks=(_TASK,),
        samples=samples,
        loss="targets",
        vocabulary_size=tokenizer.vocab_size,
        pad_id=pad if isinstance(pad, int) and pad >= 0 else tokenizer.eos_id,
        bos_id=0,
        eos_id=tokenizer.eos_id,
        max_input_length=longest[0],
        max_target_length=longest[1],
        files={path.name: FileDigests.of(path) for split in SPLITS for path in files_of(folder, split)},
    )
    write_meta(folder, meta)


def is_written(folder: Path) -> bool:
    """Whether a folder was written to its end."""
    return manifest_path(folder).is_file()


def _write_split(prefix: Path, dataset: Any, vocabulary: int) -> npt.NDArray[np.int32]:
    """Write one split's files; lengths of input and target, int32[samples, 2]."""
    lengths: list[tuple[int, int]] = []
    checksums: list[int] = []
    earlier: list[tuple[int, int, int]] = []
    count = 0 if dataset is None else len(dataset)
    dtype = token_dtype(vocabulary)
    with data_path(prefix).open("wb") as file:
        for sample in filter(None, (sample_of(dataset, index) for index in range(count))):
            tokens, learned = sample
            target = target_start(learned)
            earlier += [(len(lengths), first, end) for first, end in spans(learned)]
            lengths.append((target, len(tokens) - target))
            stored = tokens.astype(dtype).tobytes()
            checksums.append(zlib.crc32(stored))
            file.write(stored)
    if skipped := count - len(lengths):
        say(f"{prefix.name}: {skipped} of {count} samples are left out, as nothing of them is learned")
    pairs = np.array(lengths, np.int32).reshape(-1, 2)
    write_index(prefix, dtype, len(pairs), lambda: [pairs.ravel()])
    save_array(checksums_path(prefix), np.array(checksums, np.uint32))
    save_array(task_ids_path(prefix.parent, prefix.name), np.zeros(len(pairs), np.int16))
    if earlier:
        save_array(spans_path(prefix), np.array(earlier, np.int64))
    return pairs
