"""The examples run, and learn."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from tests.helpers.processes import run_ranks
from tests.modules.models import quiet

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(rank: int, world_size: int, name: str, arguments: list[str]) -> str:
    quiet()
    script = str(EXAMPLES / name)
    sys.argv, sys.path = [script, *arguments], [str(EXAMPLES), *sys.path]
    # Ranks of the harness look as if they had a GPU, for Megatron's sake.
    no_gpu = mock.patch("torch.cuda.is_available", return_value=False)
    with no_gpu, contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def learn(name: str, ranks: int, arguments: list[str]) -> None:
    printed, *others = run_ranks(run_example, ranks, {"name": name, "arguments": arguments}, deadline_s=200)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+), micro-batches \d+x\d+", printed)]
    assert losses[-1] < losses[0] - 0.2
    assert not any(others)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(2, ["--epochs", "1"]), pytest.param(4, ["--replicas", "2", "--epochs", "2"], marks=pytest.mark.slow)],
)
def test_any_module_learns(ranks, arguments):
    learn("any_module.py", ranks, arguments)


@pytest.mark.slow  # test_models holds such a model against one process every day
def test_adapters_learn_and_they_alone_are_written(tmp_path):
    learn("lora_module.py", 2, ["--epochs", "2", "--output", str(tmp_path)])
    names = [set(load_file(tmp_path / f"{stage}.safetensors")) for stage in range(2)]
    assert all("lora_" in name for stage in names for name in stage)
    assert len(names[0] | names[1]) == 4 * 4 * 2 and not names[0] & names[1], "two each of four layers of four blocks"


def test_a_model_of_torchtitans_kind_trains_as_under_1f1b():
    *_, printed = run_ranks(run_example, 2, {"name": "titan_model.py", "arguments": []}, deadline_s=200)
    rows = re.findall(r"planned ([0-9.]+) of (\d+) positions, 1F1B ([0-9.]+) of (\d+)", printed)
    assert [float(row[0]) for row in rows] == pytest.approx([float(row[2]) for row in rows], rel=1e-4)
    assert float(rows[-1][0]) < float(rows[0][0]) and int(rows[0][1]) < 0.6 * int(rows[0][3])


@pytest.mark.parametrize("name", ["any_module.py", "lora_module.py"])
def test_an_example_is_short_and_needs_no_megatron(name):
    source = (EXAMPLES / name).read_text()
    assert len(source.splitlines()) <= 80
    assert "megatron." not in source.replace("megatron_dynapipe", "")
