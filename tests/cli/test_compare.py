"""The compare command: its report and table, and where its batches come from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.batches import dataset_batches
from megatron_dynapipe.cli.compare import geometric_means
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling import LengthTable, LongSamples, Sampler, SamplerSettings
from tests.helpers.planning_commands import arguments, report
from tests.helpers.random_dataset import make_dataset

METHODS = ["dynapipe", "packed_rows", "verl", "slime", "bridge", "token_based", "uniform", "packing", "padding"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "made")


def with_batches(path: Path, *batches: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": list(batches)}))
    return path


def of_dataset(dataset: Path, cost_file: Path, *more: str, name: str = "compare") -> list[str]:
    command = arguments(name, Path("none"), cost_file, *more)
    place = command.index("--batches")
    return [*command[:place], "--data", str(dataset), *command[place + 2 :]]


def test_compare(batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("compare", batches_file, cost_file, "--json", "--max-seq-len", "300")) == 0
    loaded = report(capsys)
    assert loaded["format"] == "dynapipe-compare/1"
    over = loaded["methods"]["dynapipe"]["geomean_over"]
    assert list(over) == METHODS[1:] and over["packed_rows"] >= 1
    assert loaded["methods"]["padding"]["geomean_over"]["dynapipe"] == pytest.approx(1 / over["padding"])
    for batch in loaded["batches"]:
        methods = batch["methods"]
        assert list(methods) == METHODS
        assert all(method["error"] is None for method in methods.values())
        assert methods["dynapipe"]["ms"] <= methods["padding"]["ms"]
        assert methods["padding"]["padding_efficiency"] < methods["dynapipe"]["padding_efficiency"]
        assert methods["padding"]["shapes"] <= 2 <= methods["packed_rows"]["shapes"]


def test_rivals_run_all_positions(tmp_path: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only planned micro-batches leave out what does not count."""
    tokens = [60, 50, 40, 30, 20, 9]
    file = with_batches(
        tmp_path / "labels.json", {"id": "a", "input": tokens}, {"id": "b", "input": tokens, "labels": [2] * 6}
    )
    assert main(arguments("compare", file, cost_file, "--json")) == 0
    everything, labels = (batch["methods"] for batch in report(capsys)["batches"])
    assert {name for name in everything if labels[name]["ms"] != everything[name]["ms"]} == {"dynapipe"}
    assert labels["dynapipe"]["ms"] < everything["dynapipe"]["ms"]


def test_for_people(batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every column has its unit; methods without a plan share a line; the last line is of all batches."""
    assert main(arguments("compare", batches_file, cost_file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "b0"
    columns = ["method", "time, ms", "tokens/s", "memory, MB", "idle", "micro-batches", "distinct shapes"]
    assert re.split(r"\s{2,}", lines[1].strip()) == columns
    reason = "sample 0 of padded shape 1x600 lies outside the cost model's lengths"
    assert lines[9].startswith("  dynapipe: ") and "% of the time is work" in lines[9]
    assert lines[10].startswith(f"  no plan under packing, padding: {reason}")
    assert lines[11].startswith("b1: no plan under any method: sample 1 of padded shape 1x600 lies outside")
    assert lines[12].startswith("tokens/s of dynapipe, as a multiple of other methods' (geometric mean of 1 of 2")
    assert len(lines) == 13


def test_maximum_length_of_every_batch(tmp_path: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padding pads to it, and packing fills rows of it; without it, to the longest sample of the file."""
    short, long = {"id": "short", "input": [9, 17, 33]}, {"id": "long", "input": [201, 20]}

    def positions(*batches: dict[str, Any]) -> list[float]:
        """Padded positions of each batch under padding."""
        file = with_batches(tmp_path / "some.json", *batches)
        assert main(arguments("compare", file, cost_file, "--json")) == 0
        pairs = zip(report(capsys)["batches"], batches, strict=True)
        return [sum(b["input"]) / told["methods"]["padding"]["padding_efficiency"] for told, b in pairs]

    assert positions(short, long) == pytest.approx([3 * 200, 2 * 200])
    assert positions(short | {"max_seq_len": 65}, long | {"max_seq_len": 257}) == pytest.approx([3 * 64, 2 * 256])
    file = with_batches(tmp_path / "wrong.json", short | {"max_seq_len": 32})
    assert main(arguments("compare", file, cost_file)) == 2
    assert "batch short: expected samples of up to max_seq_len = 32 tokens, got one of 33" in capsys.readouterr().err
    assert main(arguments("compare", file, cost_file, "--max-seq-len", "20")) == 0


def test_the_sampler_s_own_batches(dataset: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(of_dataset(dataset, cost_file, "--limit", "3", "--global-batch-size", "10", "--json")) == 0
    batches = report(capsys)["batches"]
    assert [batch["id"] for batch in batches] == ["iteration-0", "iteration-1", "iteration-2"]
    draw = {"seed": 1234, "samples_per_iteration": 10, "max_input_length": 4096, "long_samples": LongSamples.FAIL}
    settings = SamplerSettings(family=ModelFamily.GPT, **draw)
    table = LengthTable.read(dataset, "train")
    sampler, longest = Sampler(table, settings), int((table.input + table.target).max())
    for iteration, batch in enumerate(batches):
        padding = batch["methods"]["padding"]
        tokens = int(sampler.batch(iteration).input_lengths.sum())
        assert padding["tokens_per_second"] * padding["ms"] / 1e3 == pytest.approx(tokens)
        assert tokens / padding["padding_efficiency"] == pytest.approx(10 * (-(-(longest - 1) // 8) * 8))


@pytest.mark.parametrize("family", list(ModelFamily))
def test_batches_of_a_dataset(dataset: Path, family: ModelFamily) -> None:
    """As a run with --tokens-per-global-batch draws them; an epoch is every sample."""
    batches = dataset_batches(dataset, family, batches=3, samples=64, seed=1, tokens=400)
    assert [batch.id for batch in batches] == [f"iteration-{at}" for at in range(3)]
    for batch in batches:
        assert (batch.target is not None) == (family is ModelFamily.T5)
        assert 300 < sum(batch.input) + sum(batch.target or []) <= 400
    lengths = LengthTable.read(dataset, "train")
    (batch,) = dataset_batches(dataset, ModelFamily.T5, batches=1, samples=64, seed=1)
    pairs = zip(lengths.input.tolist(), lengths.target.tolist(), strict=True)
    assert sorted(zip(batch.input, batch.target or [], strict=True)) == sorted(pairs)


def test_data_s_own_seed_and_lengths(dataset, cost_file, tmp_path, capsys) -> None:
    """A run file's length truncates as --max-seq-len does, which wins; of `plan`, which takes the same batches."""

    def times(*more: str, of: str = "predicted_ms") -> list[Any]:
        assert main(of_dataset(dataset, cost_file, "--limit", "2", "--json", *more, name="plan")) == 0
        return [iteration[of] for iteration in report(capsys)["iterations"]]

    usual, plans = times(), times(of="digest")
    assert plans == times("--data-seed", "1234", of="digest") != times("--data-seed", "5", of="digest")
    path = tmp_path / "run.yaml"
    path.write_text("num-layers: 4\nhidden-size: 32\nseq-length: 11\n")
    short = times("--max-seq-len", "12")
    said = f"longer samples are truncated to 12 tokens, as {path} has it"
    for split in ("equal", "auto"):  # which asks for the batches twice
        words = ("--limit", "2", "--model-config", str(path), "--layer-split", split)
        assert main(of_dataset(dataset, cost_file, *words, name="plan")) == 0
        assert capsys.readouterr().err.count(said) == 1
    assert times("--model-config", str(path)) == short and max(short) < min(usual)
    assert times("--model-config", str(path), "--max-seq-len", "4096") == usual


def test_a_folder_that_is_no_dataset_is_refused(cost_file, tmp_path, capsys) -> None:
    assert main(of_dataset(tmp_path, cost_file)) == 2
    assert f"expected a dataset folder with a manifest.json at {tmp_path}" in capsys.readouterr().err


def test_means_are_over_batches_that_both_can_run() -> None:
    def entry(**speeds: float | None) -> dict[str, Any]:
        rows = {name: {"error": None if rate else "long", "tokens_per_second": rate} for name, rate in speeds.items()}
        return {"methods": rows}

    over = geometric_means([entry(a=8.0, b=2.0, c=None), entry(a=9.0, b=9.0, c=3.0)])
    assert over["a"]["geomean_over"] == pytest.approx({"b": 2.0, "c": 3.0})
    assert over["c"]["geomean_over"] == pytest.approx({"a": 1 / 3, "b": 1 / 3})
    assert geometric_means([]) == {}
