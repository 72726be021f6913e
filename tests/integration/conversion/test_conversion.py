"""Weights of HuggingFace's models in Megatron's: equal logits there, and the same tensors back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes import run_ranks
from tests.integration.conversion import models

NAMES = ("gpt2", "llama", "llama-3.1", "qwen2", "qwen3", "t5-v1.1")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    (told,) = run_ranks(models.in_memory, 1, deadline_s=280)
    return told


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_source(found: dict[str, dict[str, Any]], name: str) -> None:
    told = found[name]
    assert told["size"] > 0.1, "logits that would show a difference"
    assert told["distance"] < 1e-4
    assert not told["changed"] and not told["left"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5-v1.1"])
def test_the_commands_go_there_and_back(tmp_path: Path, name: str) -> None:
    (told,) = run_ranks(models.through_files, 1, {"folder": str(tmp_path), "name": name}, deadline_s=280)
    assert told["distance"] < 1e-4
    assert not told["changed"] and told["configuration"]
    keys = yaml.safe_load(told["run_file"])
    assert keys["swiglu"] is True and keys["hidden-size"] == 64
