"""What the order search gains where ranks hold two chunks of the model each.

    python benchmarks/planning/virtual_stages.py [--shared FOLDER] [--settings t5:1,2,4 …] [--chunks 2]

Printed are predicted times of searched plans with several chunks, over those of interleaved 1F1B (the best of the same
cuts) and over those of searched plans with one chunk: geometric means over the batches, and the worst batch.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from noise import COSTS, LAYERS, ROOT, TOKENS, global_batch

from megatron_dynapipe.cost import TableCostModel
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.units import ModelFamily

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "t5:1,2,4", "t5:1,4,2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of data and tools")
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--chunks", type=int, default=2, help="of every rank")
    args = parser.parse_args()
    batches = json.loads((args.shared / "data/batches/flan_like.json").read_text())["batches"]
    print(
        f"{'setting':12} {'batches':>7} {'CPU ms':>6} {'over interleaved 1F1B':>22} {'over one chunk':>16}  mean, worst"
    )
    for setting in args.settings:
        planners = [
            planner(args.shared, setting, args.chunks, "adaptive"),
            planner(args.shared, setting, args.chunks, "1f1b"),
            planner(args.shared, setting, 1, "adaptive"),
        ]
        rows, seconds = [], []
        model = setting.partition(":")[0]
        for batch in (b for b in batches if b["model"] == model and b["tokens"] == TOKENS):
            given = global_batch(batch)
            try:
                start = time.process_time()
                times = [planners[0].plan(given, 0).totals.predicted_ns]
                seconds.append(time.process_time() - start)
                rows.append(times + [each.plan(given, 0).totals.predicted_ns for each in planners[1:]])
            except PlanningError:
                continue  # no plan exists; counted by its absence
        words = []
        for other in (1, 2):
            ratios = [row[0] / row[other] for row in rows]
            words.append(f"{statistics.geometric_mean(ratios):.3f} {max(ratios):.3f}")
        milliseconds = statistics.median(seconds) * 1e3
        print(f"{setting:12} {len(rows):7} {milliseconds:6.0f} {words[0]:>22} {words[1]:>16}", flush=True)


def planner(shared: Path, setting: str, chunks: int, method: str) -> Planner:
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
        chunks=chunks,
        memory_limit_bytes=36_000 * 10**6,
        distributed_optimizer=True,
        schedule=ScheduleSettings(method=method),
    )
    return Planner(settings, TableCostModel.load(shared / "data/a100" / COSTS[model]))


if __name__ == "__main__":
    main()
