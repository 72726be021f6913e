"""The benchmark of the executor inside Megatron-Bridge runs, and compares equal micro-batches."""

import json

import pytest

from tests.helpers.bridge_here import MARKS
from tests.helpers.commands import run_python

pytestmark = [*MARKS, pytest.mark.slow]


def test_both_run_equal_micro_batches() -> None:
    said = run_python("-m", "benchmarks.bridge.overhead", "--pairs", "2", timeout_s=900).stdout
    measured = json.loads(said.splitlines()[-1])
    assert len(measured["shapes"]) > 1
    assert len(set(measured["shapes"])) == 1
    assert all(value > 0 for value in measured["ratio"])
