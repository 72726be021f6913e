"""The example runs, and learns."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.processes import run_ranks
from tests.modules.models import quiet

EXAMPLE = Path(__file__).parents[2] / "examples" / "any_module.py"


def run_example(rank: int, world_size: int, arguments: list[str]) -> str:
    quiet()
    sys.argv = [str(EXAMPLE), *arguments]
    # Ranks of the harness look as if they had a GPU, for Megatron's sake.
    no_gpu = mock.patch("torch.cuda.is_available", return_value=False)
    with no_gpu, contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(2, ["--epochs", "1"]), pytest.param(4, ["--replicas", "2", "--epochs", "2"], marks=pytest.mark.slow)],
)
def test_the_example_learns(ranks, arguments):
    printed, *others = run_ranks(run_example, ranks, {"arguments": arguments}, deadline_s=200)
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+), micro-batches \d+x\d+", printed)]
    assert losses[-1] < losses[0] - 0.2
    assert not any(others)


def test_the_example_is_short_and_needs_no_megatron():
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 80
    assert "megatron." not in source.replace("megatron_dynapipe", "")
