"""What the planning benchmarks plan: the two measured models, their layouts, the batches of one size."""

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

SHARED = Path(__file__).resolve().parents[3] / "shared"
"""Data and tools, beside the checkout."""
COSTS = {"gpt": "gpt_6.7b.json", "t5": "t5_11b.json"}
LAYERS = {"gpt": (32, 0, 4096), "t5": (24, 24, 1024)}
"""Encoder layers, decoder layers, hidden size."""
MEMORY_BYTES = 36_000 * 10**6
TOKENS = 65_536


def planner(shared: Path, setting: str, **changes: Any) -> Planner:
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
    return Planner(settings, TableCostModel.load(shared / "data/a100" / COSTS[model]))


def batches(shared: Path, model: str, *, longest: int | None = None) -> Iterator[GlobalBatch]:
    """A model's batches of `TOKENS` tokens, of samples cut at `longest` or less."""
    for batch in json.loads((shared / "data/batches/flan_like.json").read_text())["batches"]:
        if batch["model"] == model and batch["tokens"] == TOKENS and batch["max_seq_len"] <= (longest or 2**31):
            inputs = np.array(batch["input"], np.int32)
            targets = np.array(batch.get("target") or np.zeros(len(inputs)), np.int32)
            ids = np.arange(len(inputs))
            yield GlobalBatch(iteration=0, sample_ids=ids, input_lengths=inputs, target_lengths=targets)
