"""What the order search gains where ranks hold two chunks of the model each.

    python benchmarks/planning/virtual_stages.py [--settings t5:1,2,4 …] [--chunks 2]

Printed are predicted times of searched plans with several chunks, over those of interleaved 1F1B (the best of the same
cuts) and over those of searched plans with one chunk: geometric means over the batches, and the worst batch.
"""

import argparse
import statistics
import time

from cases import batches, planner

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.schedules import ScheduleSettings

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "t5:1,2,4", "t5:1,4,2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--chunks", type=int, default=2, help="of every rank")
    args = parser.parse_args()
    adaptive, plain = (ScheduleSettings(method=method) for method in ("adaptive", "1f1b"))
    print(
        f"{'setting':12} {'batches':>7} {'CPU ms':>6} {'over interleaved 1F1B':>22} {'over one chunk':>16}  mean, worst"
    )
    for setting in args.settings:
        planners = [
            planner(setting, chunks=args.chunks, schedule=adaptive),
            planner(setting, chunks=args.chunks, schedule=plain),
            planner(setting, schedule=adaptive),
        ]
        rows, seconds = [], []
        for given in batches(setting.partition(":")[0]):
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


if __name__ == "__main__":
    main()
