"""A dataset without a download: random tokens in tasks whose lengths have long tails, drawn from a seed.

    python -m benchmarks.throughput.synthetic FOLDER [--samples 20000] [--vocabulary 32000] [--longest 2048]

What training takes does not depend on which tokens it sees, so they are drawn evenly; lengths are log-normal around
each task's medians, which lie as far apart as those of instruction mixtures do (classification, translation, questions
about a text, summaries). The loss stays at that of guessing.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from megatron_dynapipe.data.meta import DatasetMeta, read_meta, write_meta
from tests.helpers.random_dataset import word_tokenizer
from tests.helpers.samples import write_samples

TASKS = {
    "classify": (40, 3, 4.0),
    "translate": (50, 55, 3.0),
    "infer": (100, 4, 3.0),
    "reason": (120, 110, 2.0),
    "answer": (340, 12, 2.0),
    "dialog": (420, 70, 1.0),
    "summarise": (900, 90, 1.5),
}
"""By name: median tokens of inputs and of targets, and how often training draws the task, relative to the others."""
SPREAD = 0.7
"""Standard deviation of the logarithm of lengths: one in 40 is four times as long as the median, or more."""
SPLITS = {"train": 1.0, "valid": 0.05, "test": 0.05}
"""Samples of each split, relative to training."""
SOURCE = "random tokens, lengths drawn from seed {seed}"
SPECIAL = 3
"""Tokens that pad, start and end."""


def lengths_of(samples: int, *, longest: tuple[int, int], draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tasks int16[samples], and the tokens of inputs and targets, int64[samples, 2], each at least 1."""
    rates = np.array([rate for _, _, rate in TASKS.values()])
    tasks = draw.choice(len(TASKS), samples, p=rates / rates.sum()).astype(np.int16)
    medians = np.array([medians[:2] for medians in TASKS.values()])[tasks]
    drawn = medians * np.exp(draw.normal(0.0, SPREAD, (samples, 2)))
    return tasks, np.clip(drawn.round().astype(np.int64), 1, np.array(longest))


def make(
    folder: Path,
    *,
    samples: int = 20_000,
    vocabulary: int = 32_000,
    longest: tuple[int, int] = (2048, 512),
    seed: int = 2026,
) -> Path:
    """The dataset, made where it is not there yet; `longest` are tokens of an input and of a target.

    Raises:
        SystemExit: there is another dataset at `folder`.
        DataError: there is something else.
    """
    source = SOURCE.format(seed=seed)
    if folder.exists():
        if (found := read_meta(folder).source) != source:
            raise SystemExit(f"expected a dataset of {source} at {folder}, found one of {found}; name another folder")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        word_tokenizer(made / "tokenizer", vocabulary)
        draw = np.random.default_rng(seed)
        counts = {
            split: _write(made, split, int(samples * share), vocabulary, longest, draw)
            for split, share in SPLITS.items()
        }
        write_meta(
            made,
            DatasetMeta(
                source=source,
                tasks=tuple(TASKS),
                samples=counts,
                vocabulary_size=vocabulary,
                pad_id=0,
                bos_id=1,
                eos_id=2,
                max_input_length=longest[0],
                max_target_length=longest[1],
            ),
        )
        made.rename(folder)
    return folder


def _write(
    folder: Path, split: str, samples: int, vocabulary: int, longest: tuple[int, int], draw: np.random.Generator
) -> dict[str, int]:
    """One split's files; its samples by task."""
    tasks, lengths = lengths_of(samples, longest=longest, draw=draw)
    drawn = ((ends[0], draw.integers(SPECIAL, vocabulary, sum(ends)).tolist()) for ends in lengths.tolist())
    write_samples(folder / split, ((tokens[:inputs], tokens[inputs:]) for inputs, tokens in drawn), vocabulary)
    np.save(folder / f"{split}.tasks.npy", tasks)
    return {name: int((tasks == place).sum()) for place, name in enumerate(TASKS)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=20_000, help="for training (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of an input (%(default)s)")
    options = parser.parse_args()
    make(options.folder, samples=options.samples, vocabulary=options.vocabulary, longest=(options.longest, 512))
