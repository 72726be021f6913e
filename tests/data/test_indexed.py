"""The indexed format, byte for byte and value for value against Megatron's own classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.indexed import IndexedReader
from megatron_dynapipe.data.writing import save_array
from megatron_dynapipe.sampling.lengths import ends_path
from tests.helpers.examples import examples
from tests.helpers.samples import write_samples

SAMPLES = [([1, 2, 3], [4]), ([7], [8, 9]), ([0, 99], [98, 97, 96])]


@pytest.mark.parametrize("vocabulary_size", [100, 65_499, 65_500, 250_000])
def test_bytes_equal_megatrons(tmp_path: Path, vocabulary_size: int) -> None:
    write_samples(tmp_path / "ours", SAMPLES, vocabulary_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocabulary_size))
    for input_ids, target_ids in SAMPLES:
        builder.add_document(torch.tensor(input_ids + target_ids), [len(input_ids), len(target_ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        ours, theirs = (tmp_path / f"{name}{ending}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "ours"))) == [
        "ours.bin",
        "ours.crc32.npy",
        "ours.idx",
    ]


def test_a_family_reads_its_own_ends(tmp_path: Path) -> None:
    write_samples(tmp_path / "split", SAMPLES, 100)
    save_array(ends_path(tmp_path / "split"), np.array([1, 0, 0, 1, 0, 1], np.uint8))

    def read(family: ModelFamily | None) -> list[tuple[list[int], list[int]]]:
        reader = IndexedReader(tmp_path / "split", family)
        return [(reader[at][0].tolist(), reader[at][1].tolist()) for at in range(3)]

    assert read(None) == SAMPLES
    assert read(ModelFamily.GPT) == [([1, 2], [4]), *SAMPLES[1:]]
    assert read(ModelFamily.T5) == [SAMPLES[0], ([7], [8]), ([0, 99], [98, 97])]


def test_reading(tmp_path: Path) -> None:
    """Tokens are not to be changed; samples are counted from 0; a split may be empty."""
    write_samples(tmp_path / "split", SAMPLES, 100)
    reader = IndexedReader(tmp_path / "split")
    with pytest.raises(ValueError, match="read-only"):
        reader[0][0][0] = 5
    for sample in (-1, 3):
        with pytest.raises(DataError, match=rf"expected a sample in 0…2, got {sample}"):
            reader[sample]
    write_samples(tmp_path / "empty", [], 100)
    assert len(IndexedReader(tmp_path / "empty")) == 0


ids = st.lists(st.integers(0, 69_999), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(samples=st.lists(st.tuples(ids, ids), min_size=1, max_size=8))
def test_values_equal_megatrons(tmp_path: Path, samples: Any) -> None:
    write_samples(tmp_path / "split", samples, 70_000)
    reader, theirs = IndexedReader(tmp_path / "split"), IndexedDataset(str(tmp_path / "split"))
    assert len(reader) == len(samples) == len(theirs) // 2
    for at, (input_ids, target_ids) in enumerate(samples):
        read_input, read_target = reader[at]
        assert read_input.tolist() == theirs[2 * at].tolist() == input_ids
        assert read_target.tolist() == theirs[2 * at + 1].tolist() == target_ids
