"""Batches of a dataset for planning, and how much of them would be padding."""

import json
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.data.batches import dataset_sampler
from megatron_dynapipe.data.waste import METHODS, padding_waste
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


@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    """What it prints, `plan` plans."""
    command = ["data", "batches", str(folder), "--model", model, "--limit", "3", "--tokens-per-global-batch", "400"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    batches = json.loads(printed)["batches"]
    assert [batch["id"] for batch in batches] == ["b0", "b1", "b2"]
    for batch in batches:
        assert ("target" in batch) == (model == "t5")
        assert 300 < sum(batch["input"]) + sum(batch.get("target", [])) <= 400
    (tmp_path / "batches.json").write_text(printed)
    costs = Path(__file__).parents[2] / "benchmarks" / "data" / "a100"
    if (file := costs / ("gpt_6.7b.json.gz" if model == "gpt" else "t5_11b.json.gz")).exists():
        layers = ["--layers", "2"] if model == "gpt" else ["--encoder-layers", "1", "--decoder-layers", "1"]
        plan = [
            "plan",
            "--batches",
            str(tmp_path / "batches.json"),
            "--cost-model",
            str(file),
            "--model",
            model,
            *layers,
        ]
        assert (
            main(
                [*plan, "--hidden-size", "4096" if model == "gpt" else "1024", "--device-memory-mb", "40000", "--json"]
            )
            == 0
        )
    assert main(["data", "batches", str(folder), "--limit", "0"]) == 2


@pytest.mark.parametrize("family", list(ModelFamily))
def test_padding_waste(folder: Path, family: ModelFamily) -> None:
    sampler = dataset_sampler(folder, family, samples_per_iteration=32)
    waste = padding_waste([sampler.batch(0)], family)
    assert list(waste) == list(METHODS)
    known = {name: share for name, share in waste.items() if share is not None}
    assert known["padding"] == max(known.values())
    assert known["packed rows"] < known["padding"]
    assert all(0 <= share < 1 for share in known.values())


def test_picture_and_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "stats.svg"
    assert main(["data", "stats", str(folder), "--picture", str(picture), "--global-batch-size", "16"]) == 0
    out = capsys.readouterr().out
    assert "padding of all positions, by the method that makes micro-batches:" in out
    assert "token based" in out
    assert "<svg" in picture.read_text()
    assert main(["data", "stats", str(folder), "--waste", "--json", "--global-batch-size", "16"]) == 0
    assert set(json.loads(capsys.readouterr().out)["padding_waste"]) == set(METHODS)
