"""Arguments of the commands that plan, for the tiny cost model of `tests/cli/conftest.py`."""

from pathlib import Path


def arguments(command: str, batches: Path, cost: Path, *more: str) -> list[str]:
    given = {
        "--batches": str(batches),
        "--cost-model": str(cost),
        "--model": "gpt",
        "--layers": "4",
        "--hidden-size": "32",
        "--pipeline-parallel": "2",
        "--device-memory-mb": "200",
        "--recompute": "none",
    }
    return [command, *(part for pair in given.items() for part in pair), *more]
