"""Plans with teams of replicas, without, and Megatron-LM's dynamic context parallelism, each on its own best layout.

    python -m benchmarks.planning.teams [--layouts 8,1,8 …] [--batches 3] [--samples 64 256] [--tails "2% of 32-128k" …]

Most samples are below 8,192 positions (lognormal around 600); the tail is log-uniform. The model is LLaMA 3 8B by
computed costs, on nodes of eight H100s as `configs/clusters/h100_80gb.yaml` has them. Every plan is made and verified;
times are predicted ms of all batches together, "-" where one of them does not fit the memory. Seconds are of planning,
in processor time. The rival (`dynamic_cp`, of Megatron-LM's dev branch) runs under 1F1B and pays for shares what plans
do; released versions refuse pipelines, so that layouts of one stage alone are theirs, too.
"""

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec
import numpy as np

from benchmarks.planning.dynamic_cp import fastest_run
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.network import Network
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import AnalyticCostModel, ModelShape, model_of_layers
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.rivals.methods import Longest, method_settings
from megatron_dynapipe.ways.rivals.rules import row_sizes

LLAMA = ModelShape(
    family=ModelFamily.GPT,
    hidden=4096,
    heads=32,
    kv_channels=128,
    ffn=14336,
    vocabulary=128256,
    query_groups=8,
    gated=True,
    rms_norm=True,
    biases=False,
    rotary=True,
    tied=False,
    keeps_scores=False,
)
NODE = Network(
    devices_per_node=8,
    intra_node_gbps=3040.0,
    inter_node_gbps=400.0,
    intra_node_latency_us=10.0,
    inter_node_latency_us=20.0,
)
TAILS = {
    "0.5% of 64-128k": (0.005, 65_536, 131_072),
    "2% of 32-128k": (0.02, 32_768, 131_072),
    "10% of 32-128k": (0.1, 32_768, 131_072),
    "none": (0.0, 1, 1),
}
"""Share of samples, and their shortest and longest, of which each batch has one at least."""
LONGEST = 131_072
LAYOUTS = ("8,1,8", "8,2,4", "16,1,4", "16,2,2", "32,1,2", "8,4,2", "8,8,1", "16,4,1", "32,2,1", "64,1,1")
"""All of 64 devices that have at least eight replicas."""


def mixture(tail: str, samples: int, seed: int) -> GlobalBatch:
    """A batch of so many samples."""
    share, least, most = TAILS[tail]
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(np.log(600), 1.0, samples)).clip(16, 8191).astype(np.int64)
    long = max(round(samples * share), int(share > 0))
    lengths[:long] = np.exp(random.uniform(np.log(least), np.log(most), long)).astype(np.int64)
    return GlobalBatch.of_positions(lengths.tolist(), 0)


def settings(data: int, tensor: int, pipeline: int) -> PlannerSettings:
    """A run on data × tensor × pipeline H100s, without teams."""
    return PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, 32),
        hidden_size=LLAMA.hidden,
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        sequence_parallel=tensor > 1,
        memory_limit_bytes=72 * 10**9,
        distributed_optimizer=True,
        network=NODE,
        micro_batch_layouts=tuple(BatchLayout),
        slices="auto",
        split_backward="auto",
    )


@dataclass(slots=True)
class Row:
    """One layout: predicted ms of all batches, seconds of planning them, and the teams of each plan."""

    without: float = 0.0
    teams: float = 0.0
    rival: float = 0.0
    seconds: tuple[float, float] = (0.0, 0.0)
    chosen: list[str] = field(default_factory=list)


def planned(run: PlannerSettings, costs: AnalyticCostModel, batch: GlobalBatch) -> tuple[float, float, str]:
    """Predicted ms, seconds of planning, and how many teams run of which size; infinite where there is no plan."""
    began = time.process_time()
    try:
        plan = planner_of(run, costs).plan(batch, 0)
    except PlanningError:
        return inf, time.process_time() - began, ""
    seconds = time.process_time() - began
    ranks = Counter(size for replica in plan.replicas for size in {mb.share[0] for mb in replica.micro_batches})
    teams = " then ".join(f"{ranks[size] // size} × {size}" for size in sorted(ranks, reverse=True))
    return plan.totals.predicted_ns / 1e6, seconds, teams


def rival_ms(run: PlannerSettings, costs: AnalyticCostModel, batch: GlobalBatch) -> float:
    """Predicted ms of dynamic context parallelism in the same pipeline; infinite where its rows do not fit."""
    longest = Longest(int(-(-batch.input_lengths.max() // 8) * 8), 0)
    try:
        planner = planner_of(method_settings("packed_rows", longest, run), costs)
        samples = planner.samples(batch)
        sizes = row_sizes(samples.input_positions.tolist(), longest.inputs, run.data_parallel)
        return fastest_run(planner, samples, sizes).makespan_ns / 1e6
    except PlanningError:
        return inf


def row_of(layout: str, costs: AnalyticCostModel, batches: Sequence[GlobalBatch]) -> Row:
    """All three ways on a layout."""
    data, tensor, pipeline = map(int, layout.split(","))
    without = settings(data, tensor, pipeline)
    teams = msgspec.structs.replace(without, context_teams=data)
    row = Row()
    for batch in batches:
        alone, seconds, _ = planned(without, costs, batch)
        shared, more, chosen = planned(teams, costs, batch)
        row.without += alone
        row.teams += shared
        row.rival += rival_ms(without, costs, batch)
        row.seconds = (row.seconds[0] + seconds, row.seconds[1] + more)
        row.chosen.append(chosen)
    return row


def fastest(rows: Mapping[str, Row], way: str, *, most_stages: int = 8) -> float:
    """The least time of a way on any layout of at most so many stages."""
    return min(
        (getattr(row, way) for layout, row in rows.items() if int(layout.split(",")[2]) <= most_stages), default=inf
    )


def show(heading: str, rows: Mapping[str, Row]) -> None:
    """Print a table of layouts, the fastest in the last row, and ratios of the fastest."""
    print(f"\n{heading}\n\n| data, tensor, pipeline | no teams | teams | dynamic CP | chosen | seconds |")
    print("|---|---|---|---|---|---|")
    for layout, row in rows.items():
        times = " | ".join(map(_ms, (row.without, row.teams, row.rival)))
        print(f"| {layout} | {times} | {', '.join(row.chosen)} | {row.seconds[0]:.1f} → {row.seconds[1]:.1f} |")
    best = [fastest(rows, way) for way in ("without", "teams", "rival")]
    print(f"| **best** | {' | '.join(map(_ms, best))} | | |\n")
    over = [other / best[1] for other in (best[0], best[2], fastest(rows, "rival", most_stages=1))]
    print("over none {:.2f}, over dynamic CP {:.2f}, over that without pipelines {:.2f}".format(*over), flush=True)


def _ms(time: float) -> str:
    return f"{time:,.0f}" if time < inf else "-"


def main() -> None:
    """Print a table for each mixture and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--samples", nargs="*", type=int, default=(64, 256))
    parser.add_argument("--tails", nargs="*", default=tuple(TAILS))
    parser.add_argument("--batches", type=int, default=3)
    args = parser.parse_args()
    rates = rates_of("NVIDIA H100 80GB HBM3")
    assert rates is not None, "a known device"
    costs = AnalyticCostModel(LLAMA, rates, max_size=64, max_length=LONGEST)
    for tail in args.tails:
        for samples in args.samples:
            batches = [mixture(tail, samples, seed) for seed in range(args.batches)]
            show(f"{tail}, {samples} samples", {layout: row_of(layout, costs, batches) for layout in args.layouts})


if __name__ == "__main__":
    main()
