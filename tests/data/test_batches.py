"""Batches of a dataset for planning."""

from pathlib import Path

import pytest

from megatron_dynapipe.cli.batches import dataset_batches
from megatron_dynapipe.sampling import LengthTable
from megatron_dynapipe.units import ModelFamily
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("batches") / "data")


def test_an_epoch_is_every_sample(folder: Path) -> None:
    lengths = LengthTable.read(folder, "train")
    (batch,) = dataset_batches(folder, ModelFamily.T5, batches=1, samples=64, seed=1)
    assert sorted(batch.input) == sorted(lengths.input.tolist())
    assert sorted(zip(batch.input, batch.target or [], strict=True)) == sorted(
        zip(lengths.input.tolist(), lengths.target.tolist(), strict=True)
    )


@pytest.mark.parametrize("family", list(ModelFamily))
def test_batches_by_tokens(folder: Path, family: ModelFamily) -> None:
    """As a run with --tokens-per-global-batch draws them."""
    found = dataset_batches(folder, family, batches=3, samples=64, seed=1, tokens=400)
    assert [batch.id for batch in found] == [f"iteration-{at}" for at in range(3)]
    for batch in found:
        assert (batch.target is not None) == (family is ModelFamily.T5)
        assert 300 < sum(batch.input) + sum(batch.target or []) <= 400
