"""How much plans gain by costs that follow what passes take, on stages that are slower or faster than costs say.

    python -m benchmarks.planning.corrections [--batches N] [--stages 4 8]

GPT of 7B, computed H100 costs, packed rows, held-out batches. The passes of every stage take a factor of their own
times what costs say, and each pass by itself up to 10% more or less. After 16 iterations costs are corrected as a run
corrects them. Times are what the true passes take under each plan: of costs as they are, corrected, and of a planner
that knows the factors.
"""

import argparse
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.common import markdown
from benchmarks.planning.cases import COSTS, MEMORY_MB, recorded_batches
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.network import cuda_rules
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import TableCostModel, model_of_layers
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.batch import batch_of

STEP, EVERY, PASSES, NOISE = 2, 16, 64, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=3, metavar="N")
    parser.add_argument("--stages", type=int, nargs="*", default=[4, 8])
    args = parser.parse_args()
    costs = TableCostModel.load(COSTS["h100"]["gpt"])
    rows = []
    for stages in args.stages:
        base = PlannerSettings(
            model=model_of_layers(ModelFamily.GPT, 32),
            hidden_size=costs.hidden_size or 4096,
            pipeline_parallel=stages,
            memory_limit_bytes=MEMORY_MB["h100"] * 10**6,
            micro_batch_layouts=tuple(BatchLayout),
            slices="auto",
            split_backward="auto",
            transfers=cuda_rules({}),
        )
        batches = [
            batch_of(batch["input"], ModelFamily.GPT)
            for batch in recorded_batches("sft_like")
            if batch["max_seq_len"] == 2048
        ][: args.batches]
        for name, factors in disturbances(stages):
            settings = [base, corrected(base, measured(factors)), corrected(base, np.round(100 * factors))]
            planners = [planner_of(each, costs) for each in settings]
            ms = [sum(truly_ns(made, planners[2], batch) for batch in batches) / 1e6 for made in planners]
            rows.append([str(stages), name, *(f"{time:,.0f}" for time in ms), f"{ms[0] / ms[1]:.3f}"])
            rows[-1] += [f"**{ms[2] / ms[1]:.3f}**"]
            print(" | ".join(rows[-1]), flush=True)
    columns = ("stages", "what is slower", "as costs say, ms", "corrected", "known", "gain", "of what knowing reaches")
    print(markdown(columns, rows))


def disturbances(stages: int) -> list[tuple[str, np.ndarray]]:
    """By name, factors of forward passes and both halves of backward ones on every stage: float64[stages, 3]."""
    random = np.random.default_rng(0)
    found = [
        (f"every kind of pass by up to {share:.0%}", random.uniform(1 - share, 1 + share, (stages, 3)))
        for share in (0.1, 0.25)
    ]
    for name, stage in (("the first", 0), ("a middle", stages // 2), ("the last", stages - 1)):
        for share in (0.1, 0.25):
            factors = np.ones((stages, 3))
            factors[stage] += share
            found.append((f"{name} stage by {share:.0%}", factors))
    return found


def measured(factors: np.ndarray) -> np.ndarray:
    """What a run makes of them: the median of its iterations, each of the sum of its passes, in steps."""
    noise = np.random.default_rng(1).uniform(1 - NOISE, 1 + NOISE, (EVERY, PASSES, *factors.shape)).mean(axis=1)
    return np.clip(np.round(100 * np.median(factors * noise, axis=0) / STEP) * STEP, 50, 200)


def corrected(base: PlannerSettings, percents: np.ndarray) -> PlannerSettings:
    rows: Sequence[tuple[int, int, int]] = [tuple(map(int, row)) for row in percents]
    return msgspec.structs.replace(base, corrections=tuple(rows))


def truly_ns(made: Planner, knowing: Planner, batch: GlobalBatch) -> int:
    """Time of a planner's passes under the costs that another knows."""
    held, scheduled = made.scheduled(batch, forward_only=False, seconds={})
    problem = knowing.problem(held)
    longest = 0
    for rows, schedule in zip(scheduled.replicas, scheduled.schedules, strict=True):
        members, layouts = [scheduled.members[row] for row in rows], [scheduled.batch_layouts[row] for row in rows]
        costs, _ = problem.costs_of(members, layouts, scheduled.modes[rows])
        longest = max(longest, simulate(costs, schedule.order).makespan_ns)
    return longest


if __name__ == "__main__":
    main()
