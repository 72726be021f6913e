"""How long plans take by stage of the planner, from one pipeline stage to eight and from small batches to large ones.

    python -m benchmarks.planning.stages DATA [--models gpt t5] [--pipelines 1 2 4 8] [--tokens 16384 …] [--batches 5]

DATA is that of `recorded.py`; the models are a GPT of 7B and T5-XXL on H100s, one replica, with packed rows, pieces and
divided backward passes. Batches are drawn from the recorded samples of up to 2,048 positions, seeded. Printed are the
median, the ninth of ten and the most milliseconds of processor time of a plan, and what part of its time each stage of
the planner takes in the median plan. One process on one core.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common import markdown
from benchmarks.planning.recorded import BOTH, GPT, MODELS, Model, _settings, batches, cost_model
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.sampling import GlobalBatch

STAGES = ("ordering", "partition", "schedule", "lowering", "verify")
TOKENS = [16_384, 65_536, 262_144, 1_048_576]
MEMORY_GB = 72
COSTS = {"gpt": MODELS[2], "t5": MODELS[3]}


class Timed(NamedTuple):
    """One plan: seconds of processor time, and of wall-clock by stage."""

    processor_s: float
    by_stage: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", nargs="*", default=list(COSTS), choices=list(COSTS))
    parser.add_argument("--pipelines", nargs="*", type=int, default=[1, 2, 4, 8], help="stages")
    parser.add_argument(
        "--tokens", nargs="*", type=int, default=[16_384, 65_536, 262_144, 1_048_576], help="of a batch"
    )
    parser.add_argument("--batches", type=int, default=5, help="of every size")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for stages in args.pipelines:
            planner = planner_for(COSTS[name], stages, args.data)
            for tokens in args.tokens:
                drawn = [batch_of(name, tokens, seed, args.data) for seed in range(args.batches)]
                plans = [timed(planner, batch) for batch in drawn]
                rows.append((f"{name} 1,{8 // stages},{stages}", f"{tokens:,}", *row(plans)))
    print(markdown(("setting", "tokens", "median ms", "nine tenths", "most", *STAGES), rows))


def planner_for(model: Model, stages: int, data: Path) -> Planner:
    """A planner of eight devices: as many pipeline stages, the others tensor-parallel."""
    changes = {"micro_batch_layouts": BOTH, "split_backward": "auto"}
    changes |= {"slices": "auto"} if model.family is GPT else {}
    settings = _settings(model, (1, 8 // stages, stages), MEMORY_GB, changes, tuple(Recompute))
    return planner_of(settings, cost_model(model.costs, data))


def batch_of(name: str, tokens: int, seed: int, data: Path) -> GlobalBatch:
    """Samples drawn from the recorded ones, as many as have so many positions."""
    recorded = [batch for key, batch in batches(data).items() if key.startswith(f"{name}-s2048")]
    inputs = np.concatenate([batch.input_lengths for batch in recorded])
    targets = np.concatenate([batch.target_lengths for batch in recorded])
    mean = float((inputs + targets).mean())
    drawn = np.random.default_rng(seed).integers(len(inputs), size=round(2 * tokens / mean) + 1)
    upto = int(np.searchsorted(np.cumsum(inputs[drawn] + targets[drawn]), tokens)) + 1
    return GlobalBatch.of_lengths(inputs[drawn[:upto]], targets[drawn[:upto]])


def timed(planner: Planner, batch: GlobalBatch) -> Timed:
    """One plan of a batch."""
    began = time.process_time()
    _, by_stage = planner.plan_timed(batch, 0)
    return Timed(time.process_time() - began, by_stage)


def row(plans: Sequence[Timed]) -> tuple[str, ...]:
    """The milliseconds of some plans, and the shares of the stages in the median one."""
    in_order = sorted(plans, key=lambda plan: plan.processor_s)
    middle = in_order[len(in_order) // 2]
    ninth = in_order[min(round(0.9 * len(in_order)), len(in_order) - 1)]
    whole = sum(middle.by_stage.values())
    milliseconds = [f"{1e3 * plan.processor_s:,.0f}" for plan in (middle, ninth, in_order[-1])]
    return (*milliseconds, *(f"{middle.by_stage[stage] / whole:.0%}" for stage in STAGES))


if __name__ == "__main__":
    main()
