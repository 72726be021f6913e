"""The commands that plan: arguments for the tiny cost model of `tests/cli/conftest.py`, and what they print."""

import json
from pathlib import Path
from typing import Any


def arguments(command: str, batches: Path, cost: Path, *more: str, pipeline_parallel: bool = True) -> list[str]:
    words = ["--batches", str(batches), "--cost-model", str(cost), "--model", "gpt", "--layers", "4"]
    words += ["--hidden-size", "32", "--device-memory-mb", "200", "--recompute", "none"]
    return [command, *words, *(["--pipeline-parallel", "2"] if pipeline_parallel else []), *more]


def report(capsys: Any) -> dict[str, Any]:
    """What was printed with --json."""
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded
