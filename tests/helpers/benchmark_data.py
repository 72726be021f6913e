"""The data of the benchmarks that tests plan with, see benchmarks/data."""

import gzip
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
A100_COSTS = {"gpt": BENCHMARKS / "data/a100/gpt_6.7b.json.gz", "t5": BENCHMARKS / "data/a100/t5_11b.json.gz"}
"""Cost model files, by kind of model."""


def flan_like_batches() -> dict[str, dict]:
    """The recorded global batches, by their id."""
    file = json.loads(gzip.decompress((BENCHMARKS / "data/batches/flan_like.json.gz").read_bytes()))
    return {batch["id"]: batch for batch in file["batches"]}


def scorer() -> ModuleType:
    """The independent scorer of plans, `benchmarks/planning/score_plans.py`."""
    folder = str(BENCHMARKS / "planning")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("score_plans")
    finally:
        sys.path.remove(folder)
