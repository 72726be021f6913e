"""Datasets of a few samples in Megatron's indexed-dataset format."""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_dynapipe.data.identity import checksums_path
from megatron_dynapipe.data.writing import save_array, token_dtype, write_index
from megatron_dynapipe.sampling.lengths import data_path


def write_samples(prefix: Path, samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocabulary_size: int) -> None:
    """Write (input, target) samples, none of them empty, as `<prefix>.bin` and `<prefix>.idx`, with their checksums."""
    dtype = token_dtype(vocabulary_size)
    pairs = list(samples)
    tokens = [np.asarray([*inputs, *targets], dtype).tobytes() for inputs, targets in pairs]
    data_path(prefix).write_bytes(b"".join(tokens))
    save_array(checksums_path(prefix), np.array([zlib.crc32(sample) for sample in tokens], np.uint32))
    write_index(prefix, dtype, np.array([[len(part) for part in pair] for pair in pairs], "<i4").reshape(-1, 2))
