"""A tiny cost model and two small batches, for the commands that plan."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def table(value: float, *, keys: list[str]) -> dict[str, list[list[float]]]:
    """Costs in proportion to size and length."""
    return {key: [[size, value * size * sum(map(int, key.split(",")))] for size in (1, 2, 8, 64)] for key in keys}


def cost_model(*, hidden: int = 32, longest: int = 512, modes: Sequence[str] = ("none",)) -> dict[str, Any]:
    """A decoder-only model's file; costs are the same in every recompute mode."""
    lengths = ["8", "64", str(longest)]
    entry = {
        "tp": 1,
        "model_state_mb": {"embedding": 1.0, "encoder": 2.0},
        "time_ms": {
            part: table(0.01, keys=lengths)
            for part in ("encoder.forward", "encoder.backward", "postprocess.forward", "postprocess.backward")
        },
        "stored_activation_mb": {"encoder": table(0.05, keys=lengths)},
        "peak_activation_mb": {"encoder": table(0.06, keys=lengths)},
    }
    return {
        "format": "dynapipe-cost-model/1",
        "name": "tiny",
        "source": "test",
        "device": "none",
        "units": {},
        "model": {"type": "decoder-only", "hidden": hidden},
        "keys": {f"tp1_{mode}": entry | {"recompute": mode} for mode in modes},
    }


@pytest.fixture
def cost_file(tmp_path: Path) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(cost_model()))
    return path


@pytest.fixture
def batches_file(tmp_path: Path) -> Path:
    batches = [{"id": "b0", "input": [9, 65, 200, 12, 33], "extra": 1}, {"id": "b1", "input": [500, 600, 9]}]
    path = tmp_path / "batches.json"
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches}))
    return path
