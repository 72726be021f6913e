"""The demo mixture: three tasks of naturally different lengths out of the standard library's source."""

import platform
from pathlib import Path

from megatron_dynapipe.data.identity import meta_path
from megatron_dynapipe.data.meta import DatasetMeta, read_meta
from megatron_dynapipe.data.prepare import PrepareSettings, prepare_dataset
from megatron_dynapipe.data.stdlib_tasks import stdlib_samples
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.long_samples import LongSamples

VOCABULARY_SIZE = 4096
MAX_INPUT_LENGTH = 1536
MAX_TARGET_LENGTH = 256
SAMPLES_PER_TASK = 2000

_RECIPE = 2
"""Raised when the demo's text or settings change, so that a folder of an earlier form is made again."""


def demo_source() -> str:
    """What the manifest says about a demo folder made by this Python."""
    return f"Python {platform.python_version()} standard library, recipe {_RECIPE}"


def build_demo(output: Path) -> DatasetMeta:
    """Write the demo dataset to `output`, unless it is there already, made by the same Python and recipe.

    Raises:
        DataError: `output` holds something else, or this Python came without its source.
    """
    if _up_to_date(output):
        return read_meta(output)
    settings = PrepareSettings(
        source=demo_source(),
        vocabulary_size=VOCABULARY_SIZE,
        max_input_length=MAX_INPUT_LENGTH,
        max_target_length=MAX_TARGET_LENGTH,
        long_samples=LongSamples.SKIP,
    )
    return prepare_dataset(stdlib_samples(SAMPLES_PER_TASK), output, settings).meta


def _up_to_date(output: Path) -> bool:
    """Whether `output` is the dataset that would be written; a folder is in place only when it is whole."""
    if not meta_path(output).is_file():
        return False
    try:
        return read_meta(output).source == demo_source()
    except DataError:
        return False
