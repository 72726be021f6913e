"""A small dataset folder of random tokens, with a tokenizer of as many words."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, write_meta
from megatron_dynapipe.sampling import TruncationSide
from tests.helpers.samples import write_samples

VOCABULARY = 512


def word_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer with a word for every token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    folder.mkdir(parents=True)
    fast.save_pretrained(folder)


def make_dataset(
    folder: Path,
    samples: int = 64,
    *,
    lengths: Sequence[int] = (1, 60),
    target: int = 20,
    tasks: Sequence[str] = ("random",),
    rates: Sequence[float] = (),
    sides: Mapping[str, TruncationSide] | None = None,
    splits: Sequence[str] = SPLITS,
) -> Path:
    """Write it; `lengths` are the ends of the inputs' range, targets have fewer than `target` tokens.

    Samples take turns among the tasks, of which `rates` says how often training draws each, and `sides` where inputs
    that are too long lose tokens. Only `splits` have samples.
    """
    word_tokenizer(folder / "tokenizer", VOCABULARY)
    draw = np.random.default_rng(5)
    there = {split: samples if split in splits else 0 for split in SPLITS}
    for split, samples in there.items():
        ends = (lengths, (1, target))
        rows = [[draw.integers(3, 40, draw.integers(*bounds)).tolist() for bounds in ends] for _ in range(samples)]
        write_samples(folder / split, rows, VOCABULARY)
        np.save(folder / f"{split}.tasks.npy", (np.arange(samples) % len(tasks)).astype(np.int16))
    counts = {
        split: {task: len(range(place, count, len(tasks))) for place, task in enumerate(tasks)} if count else {}
        for split, count in there.items()
    }
    meta = DatasetMeta(
        source="random tokens",
        tasks=tuple(tasks),
        samples=counts,
        vocabulary_size=VOCABULARY,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        max_input_length=max(lengths),
        max_target_length=target,
        rates=dict(zip(tasks, rates, strict=True)) if rates else {},
        sides=dict(sides or {}),
    )
    write_meta(folder, meta)
    return folder
