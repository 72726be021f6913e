"""The commands that plan: arguments for the tiny cost model of `tests/cli/conftest.py`, and what they print."""

import json
from pathlib import Path
from typing import Any


def arguments(command: str, batches: Path, cost: Path, *more: str, pipeline_parallel: bool = True) -> list[str]:
    words = ["--batches", str(batches), "--cost-model", str(cost), "--model", "gpt", "--layers", "4"]
    words += ["--hidden-size", "32", "--device-memory-mb", "200", "--recompute", "none"]
    return [command, *words, *(["--pipeline-parallel", "2"] if pipeline_parallel else []), *more]


def model_file(folder: Path, *, layers: int, hidden: int, heads: int = 4, vocabulary: int = 512) -> str:
    """A file of a GPT, with all sizes that computed costs need; of its name, it says nothing else of a run."""
    path = folder / f"gpt-{layers}-{hidden}.json"
    sizes = {"num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads, "padded-vocab-size": vocabulary}
    path.write_text(json.dumps(sizes))
    return str(path)


def report(capsys: Any) -> dict[str, Any]:
    """What was printed with --json."""
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded
