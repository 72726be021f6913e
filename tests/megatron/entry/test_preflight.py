"""What is found before Megatron is initialised: on rank 0, in one message, with exit status 2."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.costing.format import encode_file
from megatron_dynapipe.data.meta import read_meta, write_meta
from megatron_dynapipe.sampling import LengthTable, TruncationSide
from tests.costing.models import gpt_file
from tests.helpers.commands import run_python
from tests.helpers.entry_scripts import train
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def other_vocabulary(data, tmp_path_factory) -> Path:
    folder = make_dataset(tmp_path_factory.mktemp("data") / "larger")
    write_meta(folder, msgspec.structs.replace(read_meta(folder), vocabulary_size=4096))
    return folder


def refused(family: str, flags: str, data: Path, tmp_path: Path) -> str:
    """What a rank says of a run that must not reach Megatron's initialisation."""
    (run,) = train(family, data, f"--train-iters 2 {flags}", ranks=1, report=tmp_path / "report", status=2)
    assert "Traceback" not in run["stderr"] and "time to initialize megatron" not in run["stdout"]
    assert "measuring the model's layers" not in run["stdout"]
    return run["stderr"].partition("error: ")[2]


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("t5", "--dynapipe-device-memory-limit 1", "parameters, gradients and optimizer state, of 1.0 MB"),
        ("gpt", "--dynapipe-device-memory-limit 1", "of activations on stage 0"),
        ("t5", "--dynapipe-report-dir /proc/nowhere", "expected a report folder that can be written"),
        ("gpt", "--dynapipe-calibrate 60 --seq-length 8", "--dynapipe-long-samples"),
    ],
)
def test_what_cannot_train_is_refused_before_megatron_starts(family, flags, said, data, tmp_path):
    told = refused(family, flags, data, tmp_path)
    assert said in told and "hint:" in told


@pytest.mark.parametrize(
    ("family", "model", "said"),
    [
        ("t5", {}, "expected a cost model of a t5 model"),
        ("gpt", {"heads": msgspec.Raw(b"7")}, "was measured on another model: this one has heads 4 in place of the"),
        ("gpt", {"eight_bits": msgspec.Raw(b"true")}, "this one has products in eight bits in place of the file's, or"),
    ],
)
def test_costs_of_another_model_are_refused(family, model, said, data, tmp_path):
    (tmp_path / "costs.json").write_bytes(encode_file(msgspec.structs.replace(gpt_file(), model=model)))
    assert said in refused(family, f"--dynapipe-cost-model {tmp_path / 'costs.json'}", data, tmp_path)


def test_token_ids_beyond_the_models_vocabulary_are_refused(data, other_vocabulary, tmp_path):
    told = refused("gpt", "--padded-vocab-size 512", other_vocabulary, tmp_path)
    assert "expected token ids below 512" in told and "below 4096" in told


def test_a_batch_larger_than_the_dataset_is_said(data, tmp_path):
    (run,) = train("gpt", data, "--train-iters 1 --global-batch-size 80", ranks=1, report=tmp_path / "report")
    assert "train: an iteration of 80 samples repeats some of the split's 64" in run["stdout"]


def test_what_long_samples_lose_is_said_by_task(tmp_path):
    """Inputs are cut before targets, by the sides of their tasks; samples above a batch's tokens are said, too."""
    sides = {"long": TruncationSide.LEFT}
    data = make_dataset(tmp_path / "data", lengths=(1, 40), tasks=("short", "long"), sides=sides)
    flags = "--train-iters 1 --seq-length 16 --dynapipe-long-samples truncate --tokens-per-global-batch 16"
    flags += " --dynapipe-loss targets"
    (run,) = train("gpt", data, flags, ranks=1, report=tmp_path / "report")
    lengths = LengthTable.read(data, "train")
    whole = lengths.input + lengths.target
    (line,) = re.findall(r"train: (.* samples are longer .*)", run["stdout"])
    lost = np.maximum(lengths.target - 16, 0)
    long = [int((whole[task::2] > 17).sum()) for task in (0, 1)]
    said = f"{sum(long)} of 64 samples are longer than the maximum and were truncated: {lost.sum()} of"
    assert line.startswith(f"{said} {lengths.target.sum()} target tokens are lost; by task: short {long[0]}")
    by_task = [int(lost[task::2].sum()) for task in (0, 1)]
    assert min(by_task) > 1 and f"short {long[0]} ({by_task[0]} target tokens lost)" in line
    over = int((np.minimum(whole, 17) > 16).sum())
    said = f"train: {over} samples of more tokens than --tokens-per-global-batch 16: each is an iteration of its own"
    assert over > 1 and said in run["stdout"]


def test_a_dataset_without_samples_to_test_trains_without_a_test(tmp_path):
    data = make_dataset(tmp_path / "data", splits=("train", "valid"))
    flags = "--train-iters 2 --eval-interval 1 --eval-iters 1"
    (run,) = train("gpt", data, flags, ranks=1, report=tmp_path / "report")
    assert "test: the dataset has no samples for it: there is no test at the end" in run["stdout"]
    assert "on validation set" in run["stdout"] and "on test set" not in run["stdout"]


def test_a_dataset_without_samples_to_validate_is_refused_with_evaluations(tmp_path):
    data = make_dataset(tmp_path / "data", splits=("train",))
    told = refused("gpt", "--eval-iters 1", data, tmp_path)
    assert "its valid split has none\nhint: train with --eval-iters 0" in told
    (run,) = train("gpt", data, "--train-iters 1", ranks=1, report=tmp_path / "report")
    assert "no test at the end" not in run["stdout"]


def start(*, rank: int, world_size: int, failing: list[int]) -> str:
    from megatron_dynapipe.megatron.entry import start as starting

    def check() -> int:
        if rank in failing:
            raise ConfigError(f"rank {rank} cannot")
        return rank

    try:
        return f"value {starting.start_together(check, timeout_s=20)}"
    except ConfigError as error:
        return f"reports: {error} {getattr(error, starting.REPORTED_HERE)}"
    except SystemExit as end:
        return f"leaves with {end.code}"


@pytest.mark.parametrize("failing", [[], [1], [0, 1, 2]], ids=str)
def test_ranks_start_together_or_one_reports(failing):
    outcomes = run_ranks(start, 3, {"failing": failing})
    if not failing:
        assert outcomes == ["value 0", "value 1", "value 2"]
        return
    (reporting,) = (rank for rank, said in enumerate(outcomes) if said == f"reports: rank {rank} cannot True")
    assert reporting in failing and outcomes.count("leaves with 2") == 2


@pytest.mark.slow
def test_torchrun_prints_a_refusal_once(tmp_path):
    """The error and its hint, once; below its traceback, torchrun's summary has them as the root cause."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt_multitask.py"]
    words += ["--dynapipe-config", "configs/demo_gpt.yaml", "--dynapipe-datas", "x"]
    done = run_python("-m", *words, status=1)
    lines = done.stderr.splitlines()
    assert lines[:2] == ["error: unrecognized arguments: --dynapipe-datas x", "hint: did you mean --dynapipe-data?"]
    cause = lines.index(f"  traceback : {lines[0].removeprefix('error: ')}")
    assert cause > lines.index("Root Cause (first observed failure):") and lines[cause + 1] == f"  {lines[1]}"
    assert done.stderr.count("unrecognized") == 2
    assert done.stderr.count("Traceback") == 1, "torchrun's own, which nothing that a worker does keeps away"
