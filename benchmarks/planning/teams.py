"""Plans with teams of replicas against plans without, on mixtures with a tail of long samples.

    python -m benchmarks.planning.teams [--layouts 8,1,8 …] [--batches 3] [--samples 64 256]

Most samples are below 8,192 positions (lognormal around 600); the tail is log-uniform. The model is LLaMA 3 8B by
computed costs, on nodes of eight H100s as `configs/clusters/h100_80gb.yaml` has them. Every plan is made and verified;
times are the planner's own, of shares as two pieces of their chunks and gathers inside the node. Seconds are of
planning, without teams and with them. A gain of nan: no batch has a plan without teams. With `--rival` the last column
is the time of Megatron-LM's dynamic context parallelism (`dynamic_cp`), under 1F1B in the same pipeline, over a plan's.
"""

import argparse
import statistics
import time

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


def planned(run: PlannerSettings, costs: AnalyticCostModel, batch: GlobalBatch) -> tuple[float, float, tuple[int, ...]]:
    """Predicted ms, seconds of planning, and teams; infinite where there is no plan."""
    began = time.perf_counter()
    try:
        plan = planner_of(run, costs).plan(batch, 0)
    except PlanningError:
        return float("inf"), time.perf_counter() - began, ()
    return plan.totals.predicted_ns / 1e6, time.perf_counter() - began, plan.teams


def rival_ms(run: PlannerSettings, costs: AnalyticCostModel, batch: GlobalBatch) -> float:
    """Predicted ms of dynamic context parallelism in the same pipeline; infinite where its rows do not fit."""
    longest = Longest(int(-(-batch.input_lengths.max() // 8) * 8), 0)
    try:
        planner = planner_of(method_settings("packed_rows", longest, run), costs)
        samples = planner.samples(batch)
        sizes = row_sizes(samples.input_positions.tolist(), longest.inputs, run.data_parallel)
        return fastest_run(planner, samples, sizes).makespan_ns / 1e6
    except PlanningError:
        return float("inf")


def main() -> None:
    """Print a row for each layout, mixture and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=("8,1,8", "8,2,4", "16,1,4", "16,4,1"))
    parser.add_argument("--samples", nargs="*", type=int, default=(64, 256))
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rival", action="store_true", help="predict dynamic context parallelism, too")
    args = parser.parse_args()
    rates = rates_of("NVIDIA H100 80GB HBM3")
    assert rates is not None, "a known device"
    costs = AnalyticCostModel(LLAMA, rates, max_size=64, max_length=LONGEST)
    print("| data, tensor, pipeline | tail | samples | gain | least | seconds | teams | rival |")
    print("|---|---|---|---|---|---|---|---|")
    for layout in args.layouts:
        data, tensor, pipeline = map(int, layout.split(","))
        without = settings(data, tensor, pipeline)
        most = min(data, NODE.devices_per_node // tensor)
        teams = msgspec.structs.replace(without, context_teams=most)
        for tail in TAILS:
            for samples in args.samples:
                rows = []
                rivals = []
                for seed in range(args.batches):
                    batch = mixture(tail, samples, seed)
                    rows.append((planned(without, costs, batch), planned(teams, costs, batch)))
                    if args.rival:
                        rivals.append(rival_ms(without, costs, batch) / rows[-1][1][0])
                gains = [one[0] / other[0] for one, other in rows if one[0] < float("inf")] or [float("nan")]
                seconds = [statistics.median(row[side][1] for row in rows) for side in (0, 1)]
                chosen = ", ".join("+".join(map(str, other[2])) for _, other in rows)
                print(
                    f"| {layout} | {tail} | {samples} | {statistics.geometric_mean(gains):.2f} | {min(gains):.2f} |"
                    f" {seconds[0]:.1f} → {seconds[1]:.1f} | {chosen} | {' '.join(f'{one:.2f}' for one in rivals)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
