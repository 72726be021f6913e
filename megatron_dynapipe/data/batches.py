"""The sampler of a dataset as a run has it, for planning without training."""

from pathlib import Path
from typing import Any

from megatron_dynapipe.data.meta import DatasetMeta, read_meta
from megatron_dynapipe.sampling import LengthTable, LongSamples, Sampler, SamplerSettings, read_task_ids
from megatron_dynapipe.units import ModelFamily


def dataset_sampler(folder: Path, family: ModelFamily, split: str = "train", **settings: Any) -> Sampler:
    """The sampler of a dataset's split.

    Args:
        folder: of the dataset.
        family: kind of model.
        split: its name.
        **settings: of `SamplerSettings`; by default whole samples, truncated nowhere, 256 an iteration, tasks at the
            rates of the manifest in training.

    Raises:
        DataError: the dataset is missing or damaged, or the split is empty.
        ConfigError: a setting is out of range.
    """
    meta = read_meta(folder)
    lengths = LengthTable.read(folder, split)
    longest = meta.max_input_length + (meta.max_target_length if family is ModelFamily.GPT else 0)
    chosen: dict[str, Any] = {
        "family": family,
        "seed": 1234,
        "samples_per_iteration": 256,
        "max_input_length": max(longest, 2),
        "max_target_length": 0 if family is ModelFamily.GPT else meta.max_target_length,
        "long_samples": LongSamples.TRUNCATE,
        "task_rates": task_rates(meta) if split == "train" else (),
    }
    sampler = SamplerSettings(**chosen | settings)
    return Sampler(lengths, sampler, read_task_ids(folder, split, len(lengths)) if sampler.needs_tasks else None)


def task_rates(meta: DatasetMeta) -> tuple[float, ...]:
    """How often each task is drawn in training, by its index; empty where by its size."""
    return tuple(meta.rates.get(task, 0.0) for task in meta.tasks) if meta.rates else ()
