"""A recipe's own samples as a dataset folder, read once: the tokens that Bridge would train on, and which it learns.

    Bridge    tokens a b c d e    labels b c d e f    mask 0 1 0 1 0
    here      tokens a b c d e    learned     c   e

A sample ends with its last learned token: what follows it changes no loss.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.learned import Sample, write_learned
from megatron_dynapipe.data.meta import SPLITS

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


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


def _samples(dataset: Any | None) -> Iterator[Sample | None]:
    yield from (sample_of(dataset, index) for index in range(0 if dataset is None else len(dataset)))


def context_of(config: "ConfigContainer", pg_collection: Any) -> Any:
    """What Bridge will say when it asks for a settled recipe's datasets."""
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.bridge.data.loaders import get_train_valid_test_num_samples
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    counts = get_train_valid_test_num_samples(config)
    return DatasetBuildContext(*counts, tokenizer=build_tokenizer(config.tokenizer), pg_collection=pg_collection)


def digest(dataset: object, tokenizer: object, counts: Sequence[int]) -> str:
    """What samples depend on, as a name: what the recipe says of them and its tokenizer, and how many it asks for."""
    text = json.dumps(
        [dataset, tokenizer, *counts], default=lambda value: getattr(value, "__dict__", str(value)), sort_keys=True
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write(folder: Path, datasets: tuple[Any, Any, Any], tokenizer: Any) -> None:
    """Write a recipe's datasets of training, validation and test to a new folder; any of them may be None.

    Args:
        folder: where.
        datasets: Bridge's.
        tokenizer: Bridge's, for the tokens that rows are padded with.

    Raises:
        DataError: nothing of any training sample is learned; or as `sample_of`.
    """
    pad = getattr(tokenizer, "pad_id", None)
    write_learned(
        folder,
        {split: _samples(dataset) for split, dataset in zip(SPLITS, datasets, strict=True)},
        source="a recipe of Megatron-Bridge",
        task="recipe",
        vocabulary_size=tokenizer.vocab_size,
        pad_id=pad if isinstance(pad, int) and pad >= 0 else tokenizer.eos_id,
        eos_id=tokenizer.eos_id,
    )
