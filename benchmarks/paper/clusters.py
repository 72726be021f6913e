"""The paper's models and clusters, their parallel layouts, and the global batches that are planned for them.

    8 GPUs   GPT, 32 layers (6.7B)    T5, 24+24 layers (11B)      one node of eight A100-40GB
    16 GPUs  GPT, 64 layers           T5, 48+48 layers (22B)      two nodes
    32 GPUs  GPT, 128 layers          T5, 96+96 layers (44B)      four nodes

Costs were published for layers of two widths alone (`benchmarks/data/a100`). So the larger T5s are the paper's, which
are of one width, and the larger GPTs are deeper ones of the 6.7B's width, with about as many parameters per GPU as the
paper's (13B of width 5140, 29B of width 12288).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean
from typing import Any

import msgspec
import numpy as np

from benchmarks.planning.cases import COSTS, MEMORY_BYTES, published_results, recorded_batches
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import TableCostModel, model_of_layers
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.rivals.methods import Longest
from megatron_dynapipe.tools.tuning.space import divisions

GPUS_PER_NODE = 8
HIDDEN = {"gpt": 4096, "t5": 1024}
LAYERS = {"gpt": {8: (32, 0), 16: (64, 0), 32: (128, 0)}, "t5": {8: (24, 24), 16: (48, 48), 32: (96, 96)}}
"""Encoder (or all) and decoder layers, by kind of model and GPUs."""
LENGTHS = (512, 1024, 2048, 4096, 8192)
SIZES = (16_384, 32_768, 65_536, 131_072)
"""Tokens of a global batch."""
USUAL_LENGTH, USUAL_SIZE = 2048, 65_536
"""What is held fixed while the other one changes."""
MOST_STAGES = 16

Layout = tuple[int, int, int]
"""Data, tensor and pipeline parallelism."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one cluster."""

    family: str
    gpus: int

    @property
    def layers(self) -> tuple[int, int]:
        return LAYERS[self.family][self.gpus]

    @property
    def model(self) -> str:
        encoder, decoder = self.layers
        return f"GPT, {encoder} layers" if self.family == "gpt" else f"T5, {encoder}+{decoder} layers"

    @property
    def costs(self) -> TableCostModel:
        return _costs(self.family)

    def settings(self, layout: Layout, **changes: Any) -> PlannerSettings:
        """The planner's settings for a parallel layout, in 36 of 40 GB, with other settings besides."""
        data, tensor, pipeline = layout
        usual = PlannerSettings(
            model=model_of_layers(ModelFamily(self.family), *self.layers),
            hidden_size=HIDDEN[self.family],
            data_parallel=data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            memory_limit_bytes=MEMORY_BYTES,
            distributed_optimizer=True,
            micro_batch_layouts=tuple(BatchLayout),
        )
        return msgspec.structs.replace(usual, **changes)

    def layouts(self) -> Iterator[Layout]:
        """Every division of the GPUs, a power of two; tensor parallelism within a node, at most 16 stages."""
        for data, tensor, pipeline in divisions(self.gpus):
            if tensor <= GPUS_PER_NODE and pipeline <= MOST_STAGES and sum(self.layers) % pipeline == 0:
                yield data, tensor, pipeline


@cache
def _costs(family: str) -> TableCostModel:
    return TableCostModel.load(COSTS["a100"][family])


def longest(family: str, max_seq_len: int) -> Longest:
    """What padding pads to and rows are packed into: the maximum length, for inputs and for targets."""
    kind = ModelFamily(family)
    tokens = max_seq_len + 1 if kind is ModelFamily.GPT else max_seq_len
    targets = 0 if kind is ModelFamily.GPT else max_seq_len - 2
    return Longest.of_tokens(kind, tokens, targets)


def global_batches(family: str, max_seq_len: int, tokens: int) -> list[GlobalBatch]:
    """Two global batches of so many tokens: the recorded ones where there are any, else the first cut ones."""
    recorded = [each for each in _recorded(family, max_seq_len) if each["tokens"] == tokens]
    if len(recorded) > 1:
        return [recorded_batch(each) for each in recorded]
    return cut_batches(family, max_seq_len, tokens, count=2)


def cut_batches(family: str, max_seq_len: int, tokens: int, *, count: int, skip: int = 0) -> list[GlobalBatch]:
    """Global batches cut from the recorded one of 2^20 tokens, each closed before the sample that would exceed it."""
    (largest,) = [each for each in _recorded(family, max_seq_len) if each["tokens"] == 1_048_576]
    return list(itertools.islice(_closed(_samples(largest), tokens), skip, skip + count))


@cache
def _recorded(family: str, max_seq_len: int) -> list[dict[str, Any]]:
    return [each for each in recorded_batches() if (each["model"], each["max_seq_len"]) == (family, max_seq_len)]


def recorded_batch(recorded: dict[str, Any]) -> GlobalBatch:
    """A batch of the batches file as the planner takes it."""
    return _batch(_samples(recorded))


def _samples(recorded: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(recorded["input"], recorded.get("target") or [0] * len(recorded["input"]), strict=True))


def _closed(lengths: Sequence[tuple[int, int]], tokens: int) -> Iterator[GlobalBatch]:
    batch: list[tuple[int, int]] = []
    held = 0
    for sample in lengths:
        if held + sum(sample) > tokens and batch:
            yield _batch(batch)
            batch, held = [], 0
        batch.append(sample)
        held += sum(sample)


def _batch(samples: list[tuple[int, int]]) -> GlobalBatch:
    return GlobalBatch.of_lengths(*np.array(samples, np.int32).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the published planner predicts of a length's batches: geometric means over them.

    Planning takes seconds of one core.
    """

    layout: Layout
    tokens_per_second: float
    padding_efficiency: float
    planning_seconds: float


def published_on(family: str, max_seq_len: int, layout: Layout) -> Published | None:
    """On one layout, batches of 65,536 tokens; None where it is not on record or found no plan for one of them."""
    own = [
        each
        for each in published_results()
        if each["batch"].startswith(f"{family}-s{max_seq_len}-t{USUAL_SIZE}-")
        and (each["data_parallel"], each["tensor_parallel"], each["pipeline_parallel"]) == layout
    ]
    if len(own) < 2 or any("error" in each for each in own):
        return None
    keys = ("tokens_per_second", "padding_efficiency", "planning_seconds")
    return Published(layout=layout, **{key: geometric_mean(each[key] for each in own) for key in keys})


def published_best(family: str, max_seq_len: int) -> Published | None:
    """On its best layout of 8 GPUs that is on record."""
    found = [published_on(family, max_seq_len, layout) for layout in Case(family, 8).layouts()]
    return max(filter(None, found), key=lambda each: each.tokens_per_second, default=None)
