"""Batches of a dataset for planning."""

from pathlib import Path

import pytest

from megatron_dynapipe.data.batches import dataset_sampler
from megatron_dynapipe.sampling import LengthTable
from megatron_dynapipe.units import ModelFamily
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("batches") / "data")


def test_an_epoch_is_every_sample(folder: Path) -> None:
    lengths = LengthTable.read(folder, "train")
    (batch,) = (dataset_sampler(folder, ModelFamily.T5, samples_per_iteration=64).batch(0),)
    assert sorted(batch.sample_ids.tolist()) == list(range(64))
    assert batch.input_lengths.tolist() == lengths.input[batch.sample_ids].tolist()
