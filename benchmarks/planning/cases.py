"""What planning benchmarks plan with: costs of models on each device, batches, what the published planner found."""

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
COSTS = {
    "a100": {"gpt": DATA / "a100/gpt_6.7b.json.gz", "t5": DATA / "a100/t5_11b.json.gz"},
    "h100": {"gpt": DATA / "h100/gpt_7b.json.gz", "t5": DATA / "h100/t5_xxl.json.gz"},
}
"""Measured in 2023, and computed for 2026."""
COMPUTED = {"gpt-llama-8b": "configs/llama_like_8b.yaml", "gpt-qwen-7b": "configs/qwen_like_7b.yaml"}
"""GPTs whose costs on H100s the package computes each time, from run files."""
MEMORY_MB = {"a100": 36_000, "h100": 72_000}
PUBLISHED = DATA / "published/planner.json"
MEMORY_BYTES = MEMORY_MB["a100"] * 10**6


def recorded_batches(name: str = "flan_like") -> list[dict[str, Any]]:
    """Every batch of a batches file, as it stands there."""
    path = DATA / f"batches/{name}.json.gz"
    batches: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["batches"]
    return batches


def published_results() -> list[dict[str, Any]]:
    """What the published planner came to, an entry per layout and batch."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())["results"]
    return found
