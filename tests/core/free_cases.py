"""Random settings and batches that leave a planner everything free, and the restrictions under which each may run."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.batch import fits_alone
from megatron_dynapipe.core.errors import InfeasibleError, StallError
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import AnalyticCostModel, Experts, ModelShape, model_of_layers
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.sampling import GlobalBatch
from tests.core.planner_cases import of_lengths

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
_SMALL: dict[str, Any] = {"hidden": 1024, "heads": 16, "kv_channels": 64, "ffn": 4096, "vocabulary": 32_000}
_LLAMA: dict[str, Any] = {"kv_channels": 128, "query_groups": 8, "gated": True, "rms_norm": True, "biases": False}
_LLAMA |= {"rotary": True, "tied": False, "attention_dropout": False, "hidden_dropout": False, "keeps_scores": False}
_OF_8B = {"hidden": 4096, "heads": 32, "ffn": 14_336, "vocabulary": 128_256, **_LLAMA}
_OF_70B = {"hidden": 8192, "heads": 64, "ffn": 28_672, "vocabulary": 128_256, **_LLAMA}
MODELS = {
    "gpt": (16, ModelShape(family=GPT, **_SMALL)),
    "8b": (32, ModelShape(family=GPT, **_OF_8B)),
    "70b": (80, ModelShape(family=GPT, **_OF_70B)),
    "t5": (24, ModelShape(family=T5, **_SMALL)),
    "experts": (16, ModelShape(family=GPT, **_SMALL, experts=Experts(count=8, per_token=2, ffn=2048))),
    "adapters": (32, ModelShape(family=GPT, **_OF_8B, adapters=Adapters())),
}
"""Layers (of each of a T5's stacks) and shapes."""
RESTRICTIONS: tuple[dict[str, Any], ...] = (
    *({"recompute": modes} for count in (1, 2) for modes in combinations(Recompute, count)),
    *({"micro_batch_layouts": (layout,)} for layout in BatchLayout),
    {"slices": "off"},
    {"split_backward": "off"},
    {"split_backward": "on"},
)
"""What is planned under one of these is allowed without it."""
LESS_MEMORY = 0.93


class FreeCase(NamedTuple):
    """A batch under settings that leave everything free."""

    name: str
    settings: PlannerSettings
    model: str
    batch: GlobalBatch

    def planner(self, **changes: Any) -> Planner:
        return planner_of(msgspec.structs.replace(self.settings, **changes), costs(self.model))

    def predicted_ns(self, **changes: Any) -> int:
        """The time of its plan with some settings changed; raises PlanningError."""
        return self.planner(**changes).plan(self.batch, 0).totals.predicted_ns

    def over(self, restrictions: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, float]]:
        """How many times as long the free plan takes as a plan under each restriction that has one."""
        free = self.predicted_ns()
        for changes in restrictions:
            try:
                yield f"{self.name}: {changes}", free / self.predicted_ns(**changes)
            except (InfeasibleError, StallError):
                continue

    def over_all(self) -> Iterator[tuple[str, float]]:
        """`over` of all restrictions, and of less memory."""
        less = {"memory_limit_bytes": int(self.settings.memory_limit_bytes * LESS_MEMORY)}
        return self.over((*RESTRICTIONS, less))


@cache
def costs(model: str) -> AnalyticCostModel:
    rates = rates_of("H100")
    assert rates is not None
    return AnalyticCostModel(MODELS[model][1], rates, max_length=1 << 16)


def responses(seed: int) -> FreeCase:
    """Samples as a step of reinforcement learning has them, on a LLaMA of 70B whose memory is short."""
    random = np.random.default_rng(seed)
    prompts = np.exp(random.normal(np.log(300), 0.6, 128))
    lengths = (prompts + np.exp(random.normal(np.log(2000), 0.9, 128))).clip(2, 16_384).astype(np.int32)
    settings = PlannerSettings(
        model=model_of_layers(GPT, 80, 0),
        hidden_size=8192,
        data_parallel=2,
        tensor_parallel=4,
        pipeline_parallel=8,
        memory_limit_bytes=72 * 10**9,
        distributed_optimizer=True,
        micro_batch_layouts=(BatchLayout.PACKED,),
        transfers=CUDA_RULES,
    )
    return FreeCase(f"responses {seed}", settings, "70b", of_lengths(lengths))


def random_case(seed: int) -> FreeCase:
    """A random model, pipeline, batch and memory, from just enough for a sample to plenty."""
    random = np.random.default_rng(seed)
    name = str(random.choice(list(MODELS)))
    layers, shape = MODELS[name]
    stages = int(random.choice([1, 2, 4, 8, 8, 16]))
    chunks = int(random.choice([1, 1, 2])) if layers % (2 * stages) == 0 and stages > 1 else 1
    replicas = int(random.choice([1, 1, 1, 2]))
    spread = str(random.choice(["narrow", "wide", "to 16k", "to 60k"]))
    lengths = _lengths(random, spread if shape.family is GPT else "wide", replicas)
    targets = random.lognormal(3, 1, len(lengths)).clip(1, 1000).astype(np.int32) if shape.family is T5 else None
    settings = PlannerSettings(
        model=model_of_layers(shape.family, layers, layers if shape.family is T5 else 0),
        hidden_size=shape.hidden,
        data_parallel=replicas,
        tensor_parallel=4 if name == "70b" else 1,
        pipeline_parallel=stages,
        chunks=chunks,
        memory_limit_bytes=10**13,
        distributed_optimizer=True,
        expert_parallel=replicas if shape.experts else 1,
        micro_batch_layouts=tuple(BatchLayout),
        slices="auto",
        split_backward="auto",
        transfers=[GLOO_RULES, CUDA_RULES][int(random.integers(2))],
    )
    case = FreeCase(
        f"{seed}: {name} {replicas}·{stages}×{chunks}, {spread}", settings, name, of_lengths(lengths, targets)
    )
    return _with_memory(case, float(random.choice([0.5, 1, 1.3, 2, 4, 16])))


def _lengths(random: np.random.Generator, spread: str, replicas: int) -> np.ndarray:
    median, sigma = float(np.exp(random.uniform(5, 8))), 0.2 if spread == "narrow" else 1.0
    lengths = random.lognormal(np.log(median), sigma, int(random.integers(16, 96)) * replicas).clip(4, 8000)
    if spread.startswith("to"):
        longest = 16_000 if spread == "to 16k" else 60_000
        tail = int(random.integers(1, 5))
        lengths[:tail] = np.exp(random.uniform(np.log(4000), np.log(longest), tail))
    fits = int(np.searchsorted(lengths.cumsum(), 40_000 * replicas))
    return lengths[: max(fits, replicas)].astype(np.int32)


def _with_memory(case: FreeCase, times: float) -> FreeCase:
    """The case in so many times what its longest sample needs by itself, more where that has no plan."""
    state = int(case.planner().model_state_bytes.max())
    alone = 10**8
    while True:
        made = case.planner(memory_limit_bytes=state + alone)
        if fits_alone(made.problem(made.samples(case.batch))).all():
            break
        alone = alone * 5 // 4
    while True:
        limit = state + int(times * alone)
        settings = msgspec.structs.replace(case.settings, memory_limit_bytes=limit)
        limited = case._replace(name=f"{case.name}, {limit / 1e9:.1f} GB", settings=settings)
        try:
            limited.predicted_ns()
        except (InfeasibleError, StallError):
            times *= 1.5
        else:
            return limited
