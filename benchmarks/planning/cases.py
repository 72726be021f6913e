"""What planning benchmarks plan with: costs of two measured models, batches, what the published planner found."""

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
COSTS = {"gpt": DATA / "a100/gpt_6.7b.json.gz", "t5": DATA / "a100/t5_11b.json.gz"}
BATCHES = DATA / "batches/flan_like.json.gz"
PUBLISHED = DATA / "published/planner.json"
MEMORY_BYTES = 36_000 * 10**6


def recorded_batches() -> list[dict[str, Any]]:
    """Every batch of the batches file, as it stands there."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(BATCHES.read_bytes()))["batches"]
    return found


def published_results() -> list[dict[str, Any]]:
    """What the published planner came to, an entry per layout and batch."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())["results"]
    return found
