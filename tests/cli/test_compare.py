"""The compare command: its report and table, and where its batches come from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dynapipe.cli.batches import dataset_batches
from megatron_dynapipe.cli.compare import geometric_means
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling import LengthTable, LongSamples, Sampler, SamplerSettings
from tests.helpers.planning_commands import arguments, model_file, report
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
    assert lines[9].startswith(f"  no plan under packing, padding: {reason}")
    assert lines[10].startswith("b1: no plan under any method: sample 1 of padded shape 1x600 lies outside")
    assert lines[11].startswith("tokens/s of dynapipe, as a multiple of other methods' (geometric mean of 1 of 2")
    assert len(lines) == 12


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


def test_plans_have_the_freedom_of_rivals_and_what_is_named_is_fixed_for_all(tmp_path, capsys) -> None:
    """A head that weighs many layers: layers chosen for both, or none, and virtual stages likewise."""
    file = with_batches(tmp_path / "batches.json", {"id": "a", "input": [900, 800, 700, 600, 500, 400, 300, 200] * 2})
    model = model_file(tmp_path, layers=8, hidden=2048, heads=16, vocabulary=131072)
    words = f"compare --batches {file} --cost-model analytic --model-config {model} --pipeline-parallel 2"
    words += " --cluster h100_80gb --json"

    def times(*more: str) -> dict[str, float]:
        assert main([*words.split(), *more]) == 0
        return {name: method["ms"] for name, method in report(capsys)["batches"][0]["methods"].items()}

    free = times()
    named = times("--layers-per-stage", "4,4", "--virtual-stages", "1")
    equal = times("--layers-per-stage", "equal")
    assert free["dynapipe"] < named["dynapipe"] and free["verl"] < named["verl"]
    assert free["verl"] <= equal["verl"] <= named["verl"] and equal["dynapipe"] <= named["dynapipe"]
    assert free["dynapipe"] <= free["verl"] * 1.001


RUN_FILE = {
    "num-layers": 4,
    "hidden-size": 256,
    "num-attention-heads": 4,
    "padded-vocab-size": 1024,
    "seq-length": 512,
    "pipeline-model-parallel-size": 2,
    "tensor-model-parallel-size": 2,
    "sequence-parallel": True,
    "bf16": True,
}


@pytest.mark.parametrize(
    ("more", "same_as"),
    [
        ({"use-distributed-optimizer": True}, "--distributed-optimizer"),
        ({"dynapipe-slices": "off"}, "--slices off"),
        ({"dynapipe-layout": "padded"}, "--layout padded"),
        ({"dynapipe-layers-per-stage": "3,1"}, "--layers-per-stage 3,1"),
        ({"recompute-granularity": "full"}, "--recompute full"),
        ({"dynapipe-device-memory-limit": 70}, "--device-memory-mb 70"),
    ],
)
def test_what_a_run_file_fixes_counts(more: dict[str, Any], same_as: str, tmp_path, capsys) -> None:
    """As the flag would; its layout, too, where no flag says another."""
    file = with_batches(tmp_path / "batches.json", {"id": "a", "input": [200, 180, 150, 120, 90, 60, 30, 20]})

    def plans(run_file: dict[str, Any], flags: str) -> Any:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_file))
        words = f"plan --batches {file} --cost-model analytic --model-config {path} --cluster h100_80gb --json {flags}"
        assert main(words.split()) == 0
        (iteration,) = report(capsys)["iterations"]
        return [iteration[key] for key in ("predicted_ms", "digest")]

    layout = "--data-parallel 2 --tensor-parallel 2 --pipeline-parallel 2 --sequence-parallel"
    assert plans(RUN_FILE | more, layout if "dynapipe-layers-per-stage" not in more else "") == plans(
        RUN_FILE, f"{layout if 'dynapipe-layers-per-stage' not in more else ''} {same_as}"
    )
    alone, named = plans(RUN_FILE, ""), plans(RUN_FILE, "--tensor-parallel 2 --pipeline-parallel 2")
    assert alone == named != plans(RUN_FILE, "--tensor-parallel 2 --pipeline-parallel 2 --no-sequence-parallel")


def test_what_of_a_run_file_is_not_read_is_named(tmp_path, capsys) -> None:
    file = with_batches(tmp_path / "batches.json", {"id": "a", "input": [100, 90]})
    path = tmp_path / "run.yaml"
    ignored = {"optimizer": "sgd", "grad-reduce-in-bf16": True, "dynapipe-layers-per-stage": "3,1"}
    path.write_text(yaml.safe_dump(RUN_FILE | ignored))
    words = f"plan --batches {file} --cost-model analytic --model-config {path} --cluster h100_80gb"
    assert main(f"{words} --pipeline-parallel 4".split()) == 0
    said = "grad-reduce-in-bf16, optimizer: sgd, dynapipe-layers-per-stage (of another layout)"
    assert capsys.readouterr().err.splitlines()[0] == f"not read of {path}: {said}"
    path.write_text(yaml.safe_dump(RUN_FILE | {"use-distributed-optimizer": "yes"}))
    assert main(words.split()) == 2
    assert "expected use-distributed-optimizer to be true or false, got yes" in capsys.readouterr().err
