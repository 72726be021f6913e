"""A tiny dataset folder and micro-batches of it, for the tests of this room."""

from pathlib import Path

import numpy as np

from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout, Shape
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, open_split, read_meta, write_meta
from megatron_dynapipe.sampling.lengths import task_ids_path
from tests.helpers import lists
from tests.helpers.samples import write_samples

PAD, BOS, EOS = 0, 1, 2

SAMPLES = [([11, 12, 13], [21, 22]), ([14], [23]), ([15, 16, 17, 18], [24, 25, 26]), ([19, 20], [27])]
TASKS = [0, 1, 0, 1]


def write_dataset(folder: Path) -> Path:
    """A dataset folder with `SAMPLES` as its training split, and empty validation and test."""
    for split in SPLITS:
        samples = SAMPLES if split == "train" else []
        write_samples(folder / split, samples, 100)
        np.save(task_ids_path(folder, split), np.array(TASKS[: len(samples)], np.int16))
    sizes = {"vocabulary_size": 100, "max_input_length": 4, "max_target_length": 3}
    special = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
    counts = {"train": {"even": 2, "odd": 2}, "valid": {}, "test": {}}
    meta = DatasetMeta(source="a table in a test", tasks=("even", "odd"), samples=counts, **special, **sizes)
    write_meta(folder, meta)
    return folder


def micro_batch(
    samples: list[int],
    shape: Shape,
    *,
    inputs: list[int] | None = None,
    targets: list[int] | None = None,
    layout: BatchLayout = BatchLayout.PADDED,
) -> MicroBatch:
    """A micro-batch of these samples of `SAMPLES`; their own lengths unless others are given."""
    inputs = inputs or [len(SAMPLES[at][0]) for at in samples]
    targets = targets or [len(SAMPLES[at][1]) for at in samples]
    return lists.micro_batch(shape, inputs, targets, sample_ids=tuple(samples), layout=layout)


def collator_of(folder: Path, required: RequiredFields) -> Collator:
    """The collator of a stage over the training split, with a reader if it reads text."""
    reader = open_split(folder, "train") if required.text else None
    return Collator(required=required, reader=reader, special=read_meta(folder))
