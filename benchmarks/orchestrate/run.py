"""Our plans against those that DAPPLE publishes, under one simulator: its five models on its three kinds of cluster.

python -m benchmarks.orchestrate.run PATH_TO_DAPPLE [--models vgg-19,…] [--json FILE]

PATH_TO_DAPPLE is a checkout of https://github.com/AlibabaPAI/DAPPLE, whose folder profiling_results is read.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.common import markdown
from benchmarks.orchestrate.published import BY_PAPER, BY_PLANNER, Published
from megatron_dynapipe.cost import Network
from megatron_dynapipe.tools.tuning import LayerProfile, Orchestration, Topology, orchestrate
from megatron_dynapipe.tools.tuning.layer_profile import read_graph_profile
from megatron_dynapipe.tools.tuning.orchestrate import Assignment, OrchestrationProblem

DEVICES = 16
WRONG_EMBEDDING_BYTES, EMBEDDING_BYTES = 131e9, 131e6
"""XLNet's file gives its embedding a thousand times the 32,000 × 1024 values in fp32 that it has."""


class Model(msgspec.Struct, frozen=True):
    """A model of the planner's experiments, with the batch sizes of its paper."""

    name: str
    file: str
    profile_batch_size: int
    micro_batch_size: int
    global_batch_size: int

    def profile(self, checkout: Path) -> LayerProfile:
        """Its layers."""
        profile = read_graph_profile(checkout / "profiling_results" / self.file, self.profile_batch_size)
        layers = tuple(
            msgspec.structs.replace(layer, parameter_bytes=EMBEDDING_BYTES)
            if layer.parameter_bytes == WRONG_EMBEDDING_BYTES
            else layer
            for layer in profile.layers
        )
        return msgspec.structs.replace(profile, layers=layers)


MODELS = (
    Model("VGG-19", "vgg-19-pbs-32.txt", 32, 32, 2048),
    Model("AmoebaNet-36", "amoeba-36-pbs-1.txt", 1, 1, 128),
    Model("BERT-48", "bert-48-pbs-2.txt", 2, 2, 64),
    Model("GNMT-16", "gnmt-16-pbs-64.txt", 64, 64, 1024),
    Model("XLNet-36", "xlnet-36-pbs-1.txt", 1, 1, 128),
)


def clusters() -> Iterator[tuple[str, Topology]]:
    """Sixteen devices: two nodes of eight with NVLink, 25 Gbit/s between them; single ones at 25; single ones at 10."""
    for name, per_node, gbps in (("A", 8, 25), ("B", 1, 25), ("C", 1, 10)):
        network = Network(devices_per_node=per_node, intra_node_gbps=200, inter_node_gbps=gbps, inter_node_latency_us=0)
        yield name, Topology(devices=DEVICES, network=network)


def published_ms(problem: OrchestrationProblem, plan: Published, cluster: Topology) -> tuple[float, int]:
    """The least time of a published plan over sizes of units, which are not published, and that size."""
    ends = plan.ends or least_busiest(problem.profile, DEVICES)
    replicas = plan.replicas or (1,) * DEVICES
    free, placements = list(cluster.nodes), []
    for need in replicas:
        counts = [0] * len(free)
        for node, left in enumerate(free):
            counts[node] = min(left, need - sum(counts))
            free[node] -= counts[node]
        placements.append(tuple(counts))
    choices = (Assignment(ends=ends, placements=tuple(placements), micro_batches=n) for n in problem.unit_sizes)
    timed = [
        (predicted, each.micro_batches) for each in choices if (predicted := problem.predicted_ns(each)) is not None
    ]
    least, micro_batches = min(timed)
    return least / 1e6, micro_batches


def least_busiest(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """The ends of stages whose busiest has the least work: a straight plan where its layers are not published."""
    work = np.concatenate([[0.0], np.cumsum(np.sum(profile.times_ns(profile.sizes[0]), axis=0))])
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (work[end], (end,)) for end in range(1, len(work))}
    for _ in range(stages - 1):
        best = {
            end: min((max(best[m][0], work[end] - work[m]), (*best[m][1], end)) for m in best if m < end)
            for end in range(min(best) + 1, len(work))
        }
    return best[len(work) - 1][1]


def describe(plan: Orchestration) -> str:
    """Replicas of the stages, and the ends of their layers."""
    replicas = ":".join(str(stage.replicas) for stage in plan.stages)
    return f"{replicas} at {','.join(str(stage.end_layer) for stage in plan.stages[:-1])}"


def row(model: Model, profile: LayerProfile, name: str, cluster: Topology, *, whole: bool) -> dict[str, object]:
    """One case under one rule."""
    sizes = (model.micro_batch_size, model.global_batch_size)
    start = time.process_time()
    ours = orchestrate(profile, *sizes, cluster, whole_samples=whole)
    seconds = time.process_time() - start
    problem = OrchestrationProblem(profile, *sizes, cluster, whole_samples=whole)
    plans = {"paper": BY_PAPER[model.name, name], "planner": BY_PLANNER.get((model.name, name))}
    found: dict[str, object] = {"model": model.name, "cluster": name, "samples": "whole" if whole else "divided"}
    found |= {"plan": describe(ours), "unit": ours.unit_samples, "ms": ours.predicted_ms, "bound_ms": ours.bound_ms}
    found |= {"seconds": seconds}
    for source, plan in plans.items():
        if plan is not None:
            ms, _ = published_ms(problem, plan, cluster)
            replicas = ":".join(map(str, plan.replicas)) if max(plan.replicas, default=1) > 1 else "straight"
            found |= {f"{source}_plan": replicas, f"{source}_ms": ms, f"{source}_ratio": ours.predicted_ms / ms}
    return found


def main() -> int:
    """Print the table; 1 if a published plan is faster anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = {name.lower() for name in args.models.split(",")}
    columns = "model, cluster, samples, ours, ms, bound, paper, ours / it, planner, ours / it, s"
    print(markdown(columns.split(", "), []))
    rows = []
    for model in MODELS:
        if model.name.lower() not in wanted:
            continue
        profile = model.profile(args.checkout)
        for name, cluster in clusters():
            for whole in (True, False):
                each = row(model, profile, name, cluster, whole=whole)
                rows.append(each)
                others = [
                    f"{each[f'{source}_plan']} | {each[f'{source}_ratio']:.3f}" if f"{source}_ms" in each else "– | –"
                    for source in ("paper", "planner")
                ]
                print(
                    f"| {model.name} | {name} | {each['samples']} | {each['plan']} | {each['ms']:.1f} |"
                    f" {each['bound_ms']:.1f} | {others[0]} | {others[1]} | {each['seconds']:.2f} |",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    ratios = [value for each in rows for key, value in each.items() if key.endswith("_ratio")]
    worst, slowest = max(ratios), max(each["seconds"] for each in rows)
    print(f"{len(ratios)} comparisons; the worst: {worst:.3f} of a published plan's time")
    print(f"at most {slowest:.2f} s of the processor a plan")
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
