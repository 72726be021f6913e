"""What the planning benchmarks plan: the two measured models, their layouts, the batches of one size."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynapipe.cost import TableCostModel
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import ModelFamily

DATA = Path(__file__).resolve().parents[1] / "data"
COSTS = {"gpt": DATA / "a100/gpt_6.7b.json.gz", "t5": DATA / "a100/t5_11b.json.gz"}
BATCHES = DATA / "batches/flan_like.json.gz"
PUBLISHED = DATA / "published/planner.json"
LAYERS = {"gpt": (32, 0, 4096), "t5": (24, 24, 1024)}
"""Encoder layers, decoder layers, hidden size."""
MEMORY_BYTES = 36_000 * 10**6
TOKENS = 65_536


def planner(setting: str, **changes: Any) -> Planner:
    """A planner for a setting, "model:data,tensor,pipeline parallel", with other settings besides."""
    model, _, layout = setting.partition(":")
    data, tensor, pipeline = map(int, layout.split(","))
    encoder, decoder, hidden = LAYERS[model]
    settings = PlannerSettings(
        family=ModelFamily(model),
        encoder_layers=encoder,
        decoder_layers=decoder,
        hidden_size=hidden,
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        memory_limit_bytes=MEMORY_BYTES,
        distributed_optimizer=True,
        **changes,
    )
    return Planner(settings, TableCostModel.load(COSTS[model]))


def recorded_batches() -> list[dict[str, Any]]:
    """Every batch of the batches file, as it stands there."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(BATCHES.read_bytes()))["batches"]
    return found


def published_results() -> list[dict[str, Any]]:
    """What the published planner came to, an entry per layout and batch."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())["results"]
    return found


def batches(model: str, *, longest: int | None = None) -> Iterator[GlobalBatch]:
    """A model's batches of `TOKENS` tokens, of samples cut at `longest` or less."""
    for batch in recorded_batches():
        if batch["model"] == model and batch["tokens"] == TOKENS and batch["max_seq_len"] <= (longest or 2**31):
            yield global_batch(batch)


def global_batch(recorded: dict[str, Any]) -> GlobalBatch:
    """A batch of the batches file as the planner takes it."""
    inputs = np.array(recorded["input"], np.int32)
    targets = np.array(recorded.get("target") or np.zeros(len(inputs)), np.int32)
    return GlobalBatch(iteration=0, sample_ids=np.arange(len(inputs)), input_lengths=inputs, target_lengths=targets)
