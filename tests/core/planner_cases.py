"""A small planner over analytic costs, and batches for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from megatron_dynapipe.choosing.planners import planner_of, planner_over
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CPU_RATES, AnalyticCostModel, DeviceRates, ModelShape
from megatron_dynapipe.costing.analytic import PeakRatios
from megatron_dynapipe.costing.shape import Experts
from megatron_dynapipe.sampling import GlobalBatch
from tests.helpers.settings import settings_in_layers

KERNEL_RATES = msgspec.structs.replace(CPU_RATES, peaks=PeakRatios())
"""A CPU whose recomputed attention takes no memory to speak of, so that recomputing frees most of a layer's."""


def cost_model(
    family: ModelFamily,
    *,
    hidden: int = 128,
    heads: int = 4,
    vocabulary: int = 4096,
    rates: DeviceRates = KERNEL_RATES,
    max_size: int = 256,
    max_length: int = 2048,
    experts: Experts | None = None,
) -> AnalyticCostModel:
    sizes = {"hidden": hidden, "heads": heads, "kv_channels": hidden // heads, "ffn": 4 * hidden}
    shape = ModelShape(family=family, vocabulary=vocabulary, experts=experts, **sizes)
    return AnalyticCostModel(shape, rates, max_size=max_size, max_length=max_length)


def settings(family: ModelFamily, **changes: Any) -> PlannerSettings:
    given = {"encoder_layers": 4, "decoder_layers": 4 if family is ModelFamily.T5 else 0, "hidden_size": 128}
    given |= {"pipeline_parallel": 2, "memory_limit_bytes": 2 * 10**9}
    return settings_in_layers(family, **given | changes)


def planner(family: ModelFamily, **changes: Any) -> Planner:
    return planner_of(settings(family, **changes), cost_model(family))


def of_padded_costs(made: Planner) -> Planner:
    """The planner if only padded micro-batches had been measured, so that packed rows' costs are derived."""
    tables = [replace(under_mode, packed=None) for under_mode in made.tables]
    return planner_over(made.settings, tables, costs_digest=made.costs_digest)


def batch(family: ModelFamily, samples: int, *, seed: int = 0) -> GlobalBatch:
    random = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(random.normal([[4], [2.5]], 1, (2, samples))).astype(np.int32) + 2, 1000)
    return of_lengths(lengths[0], lengths[1] if family is ModelFamily.T5 else None, first=100)


def batch_of(*lengths: tuple[int, int]) -> GlobalBatch:
    """Samples of (input, target) tokens."""
    return of_lengths(*np.array(lengths, np.int32).T)


def of_lengths(inputs: Sequence[int], targets: Sequence[int] | None = None, *, first: int = 0) -> GlobalBatch:
    """Samples with ids from `first` on; those of a decoder-only model have no targets."""
    held = np.array(inputs, np.int32)
    wanted = np.zeros_like(held) if targets is None else np.array(targets, np.int32)
    return GlobalBatch(
        iteration=0, sample_ids=np.arange(first, first + len(held)), input_lengths=held, target_lengths=wanted
    )
